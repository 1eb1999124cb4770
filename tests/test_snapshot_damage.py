"""Files that are not as they were written: always a miss, never a wrong token, never an error."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from luceasync.disk_cache.codec import SUFFIXES, Half, decode_header
from luceasync.models.mixers import END_KINDS
from tests import tiny
from tests.engines import Answer, ask, running, written

pytestmark = pytest.mark.slow

PROMPT = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 4
NUM_TOKENS = 8
NUM_OPENER_TOKENS = 10  # of the prompt's last tokens, which open the answer
NUM_HEADER_BYTES = 4000  # about
KEEP = {"keep_prefix": True}

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("qwen3_5"), tmp_path_factory.mktemp("model"))


def kept_by(model_dir: Path, cache_dir: Path) -> Answer:
    """The answer of a server that leaves a directory of nodes."""

    async def answer() -> Answer:
        async with running(model_dir, cache_dir) as engine:
            return await ask(engine, PROMPT, NUM_TOKENS, **KEEP)

    return asyncio.run(answer())


@pytest.fixture(scope="module")
def whole(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """A directory of whole nodes, and the answer that belongs to it."""
    cache_dir = tmp_path_factory.mktemp("whole")
    return cache_dir, kept_by(model_dir, cache_dir)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of a model of the same shapes, with other weights, for the same prompt."""
    root = tmp_path_factory.mktemp("others")
    kept_by(tiny.save(tiny.build("qwen3_5", seed=1), root / "model"), root / "cache")
    return {path.name: path for path in (root / "cache").glob("*/*.safetensors")}


def nodes(cache_dir: Path, half: Half = Half.ROWS) -> list[Path]:
    """The files of rows, or of ends, by where their nodes begin and end."""

    def place(path: Path) -> tuple[int, int]:
        fields = header_of(path).metadata
        return fields.begin, fields.end

    return sorted(cache_dir.glob(f"*/*{SUFFIXES[half]}"), key=place)


def header_of(path: Path):
    content = path.read_bytes()
    names = {"namespace": path.parent.name, "key": path.stem}
    half = Half.END if path.suffix == SUFFIXES[Half.END] else Half.ROWS
    return decode_header(content, len(content), **names, end_kinds=END_KINDS, half=half)


def nodes_by_name(cache_dir: Path) -> list[Path]:
    """All files of nodes, whatever they hold."""
    return sorted(path for suffix in SUFFIXES.values() for path in cache_dir.glob(f"*/*{suffix}"))


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def header_byte(path: Path, word: bytes) -> int:
    """Where the word's last byte is."""
    return path.read_bytes().index(word) + len(word) - 1


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 64)


def swap(path: Path) -> None:
    other = nodes(path.parents[1])[-1]
    path.rename(path.with_name("aside"))
    other.rename(path)
    path.with_name("aside").rename(other)


def repeat_another(path: Path) -> None:
    shutil.copy(nodes(path.parents[1])[-1], path)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def old_schema(path: Path) -> None:
    table = {
        "__metadata__": {"schema": "luceasync.node.1"},
        "tokens": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    }
    text = json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"1234")


# A change anywhere in a header or a tensor: tests/disk_cache/test_disk_damage.py.
DAMAGE: dict[str, Damage] = {
    "length, by far": lambda path: flip(path, 7, bit=6),
    "the seal": lambda path: flip(path, header_byte(path, b'"header_xxh3_128":"') + 3),
    "padding": lambda path: flip(path, header_of(path).data_begin - 1),
    "tokens": lambda path: flip(path, header_of(path).tokens_slot.begin),
    "keys and values": lambda path: flip(path, header_of(path).held(with_end=False)[-1].end - 1),
    "cut in the header": lambda path: cut(path, 1000),
    "cut in the last tensor": lambda path: cut(path, path.stat().st_size - 1),
    "empty": lambda path: cut(path, 0),
    "extended": extend,
    "swapped": swap,
    "another node's": repeat_another,
    "a link": link,
    "a directory": make_directory,
}
FOREIGN: dict[str, Damage] = {"of an old schema": old_schema, "gone": Path.unlink}


async def served(model_dir: Path, cache_dir: Path, cold: Answer) -> tuple[int, int]:
    """Ask a server that starts over the directory, twice. How many tokens were taken up first, and
    how many files were set aside.
    """
    before = len(list(cache_dir.glob("*/quarantine/*")))
    async with running(model_dir, cache_dir) as engine:
        answer = await ask(engine, PROMPT, NUM_TOKENS)
        assert (answer.ids, answer.finish.reason) == (cold.ids, "length")
        assert answer.num_prefilled == answer.num_prompt_tokens - answer.num_cached
        again = await ask(engine, PROMPT, NUM_TOKENS)
        assert (again.ids, again.num_cached) == (cold.ids, cold.num_prompt_tokens)
        cache = engine.status().cache
        assert cache is not None
        assert cache.quarantined_total + before == len(list(cache_dir.glob("*/quarantine/*")))
        return answer.num_cached, cache.quarantined_total


@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_damaged_node_is_a_miss(model_dir, whole, tmp_path, kind: str):
    shutil.copytree(whole[0], tmp_path / "cache")
    DAMAGE[kind](nodes(tmp_path / "cache")[0])
    num_cached, num_set_aside = await served(model_dir, tmp_path / "cache", whole[1])
    assert num_cached == 0  # all of it goes on from that node
    assert num_set_aside == (2 if kind == "swapped" else 1)


@pytest.mark.parametrize("kind", ["the seal", "swapped"])
async def test_a_node_that_was_damaged_is_written_again(model_dir, whole, tmp_path, kind: str):
    shutil.copytree(whole[0], tmp_path / "cache")
    DAMAGE[kind](nodes(tmp_path / "cache")[0])
    await served(model_dir, tmp_path / "cache", whole[1])
    num_cached, _ = await served(model_dir, tmp_path / "cache", whole[1])
    # What opens the answer is too short for a file of its own where nobody asks for it.
    assert whole[1].num_prompt_tokens - num_cached <= NUM_OPENER_TOKENS


END_DAMAGE: dict[str, Damage] = {
    "a state": lambda path: flip(path, header_of(path).slots[0].begin),
    "cut": lambda path: cut(path, path.stat().st_size - 1),
    "the seal": DAMAGE["the seal"],
    "another node's": lambda path: shutil.copy(nodes(path.parents[1], Half.END)[0], path),
    "a directory": make_directory,
}


@pytest.mark.parametrize("kind", END_DAMAGE)
async def test_a_damaged_end_costs_its_state_alone(model_dir, whole, tmp_path, kind: str):
    cache_dir = shutil.copytree(whole[0], tmp_path / "cache")
    end = nodes(cache_dir, Half.END)[-2]  # of the prompt, the last is the answer's
    rows = {path: path.stat().st_ino for path in nodes(cache_dir)}
    END_DAMAGE[kind](end)
    num_cached, num_set_aside = await served(model_dir, cache_dir, whole[1])
    assert 0 < num_cached < whole[1].num_prompt_tokens  # from the state before
    assert num_set_aside == 1
    assert {path: path.stat().st_ino for path in rows} == rows  # none of them is written again


@pytest.mark.parametrize("kind", FOREIGN)
async def test_a_file_of_others_is_a_miss_and_no_damage(model_dir, whole, tmp_path, kind: str):
    shutil.copytree(whole[0], tmp_path / "cache")
    FOREIGN[kind](nodes(tmp_path / "cache")[0])
    assert await served(model_dir, tmp_path / "cache", whole[1]) == (0, 0)
    assert await served(model_dir, tmp_path / "cache", whole[1]) == (whole[1].num_prompt_tokens, 0)


async def test_another_models_files_are_never_used(model_dir, whole, others, tmp_path):
    cache_dir = shutil.copytree(whole[0], tmp_path / "cache")
    prompt_nodes = [path for path in nodes(cache_dir) if path.name in others]
    assert len(prompt_nodes) == 2  # the answers are others
    for path in prompt_nodes:
        shutil.copy(others[path.name], path)
    assert await served(model_dir, cache_dir, whole[1]) == (0, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_a_file_that_may_not_be_read_is_a_miss_and_stays(model_dir, whole, tmp_path):
    cache_dir = shutil.copytree(whole[0], tmp_path / "cache")
    nodes(cache_dir)[0].chmod(0)
    num_cached, num_set_aside = await served(model_dir, cache_dir, whole[1])
    assert (num_cached, num_set_aside) == (0, 0)


async def test_every_part_of_every_file_is_checked_when_it_is_read(model_dir, whole, tmp_path):
    """The server runs, and has no memory for nodes: each answer reads them again."""
    cache_dir, cold = shutil.copytree(whole[0], tmp_path / "cache"), whole[1]
    source = random.Random(1)
    async with running(model_dir, cache_dir, memory_bytes=0) as engine:
        for number in range(len(nodes(cache_dir)) - 1):  # the last one is the answer's own
            path = nodes(cache_dir)[number]
            end = path.with_suffix(SUFFIXES[Half.END])
            slots = [(path, slot) for slot in header_of(path).slots]
            slots += [(end, slot) for slot in (header_of(end).slots if end.exists() else ())]
            for damaged, slot in slots:
                flip(damaged, source.randrange(slot.begin, slot.end), source.randrange(8))
                answer = await ask(engine, PROMPT, NUM_TOKENS, **KEEP)
                assert (answer.ids, answer.finish.reason) == (cold.ids, "length"), slot.name
                await written(engine)
        answer = await ask(engine, PROMPT, NUM_TOKENS)
        assert (answer.ids, answer.num_cached) == (cold.ids, cold.num_prompt_tokens)
        assert engine.status().cache.quarantined_total > 10


async def test_bytes_at_random(model_dir, whole, tmp_path):
    cache_dir, cold = shutil.copytree(whole[0], tmp_path / "cache"), whole[1]
    source = random.Random(2)
    async with running(model_dir, cache_dir, memory_bytes=0) as engine:
        for _ in range(30):
            # Not by where they begin: a damaged answer stays until somebody goes on from it.
            for path in source.sample(nodes_by_name(cache_dir), 2):
                position = source.randrange(min(path.stat().st_size, NUM_HEADER_BYTES + 2000))
                flip(path, position, source.randrange(8))
            answer = await ask(engine, PROMPT, NUM_TOKENS, **KEEP)
            assert (answer.ids, answer.finish.reason) == (cold.ids, "length")
            await written(engine)
