"""Text is filled in between two others, by models whose tokenizers have tokens for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luceasync.engine.engine import LocalEngine
from luceasync.errors import RequestError
from luceasync.request import (
    Constraint,
    InfillPrompt,
    Request,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.engines import running

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("qwen3"), tmp_path_factory.mktemp("plain"))


def with_tokens(plain_dir: Path, folder: Path, names: Sequence[str]) -> tuple[Path, list[int]]:
    """The model with these special tokens, and their ids."""
    model_dir = Path(shutil.copytree(plain_dir, folder / "model"))
    path = model_dir / "tokenizer.json"
    definition = json.loads(path.read_text())
    first = 1 + max(definition["model"]["vocab"].values())
    like = definition["added_tokens"][0]
    new = [like | {"id": first + i, "content": name} for i, name in enumerate(names)]
    definition["added_tokens"] += new
    path.write_text(json.dumps(definition))
    return model_dir, [token["id"] for token in new]


async def written(
    engine: Any, prompt: Any, stop: tuple[str, ...] = (), **fields: Any
) -> tuple[list[int], str]:
    """Token ids of an answer, and why it ended."""
    sampling = Sampling(temperature=0, **fields)
    stream = await engine.open(Request(prompt, sampling, max_tokens=8, stop=stop))
    deltas = [delta async for delta in stream]
    return [i for delta in deltas for i in delta.token_ids], deltas[-1].finish.reason


@pytest.mark.parametrize("names", [QWEN, STARCODER])
async def test_the_parts_are_between_the_models_tokens(
    plain_dir: Path, tmp_path: Path, names: Sequence[str]
):
    model_dir, (before, after, middle, end) = with_tokens(plain_dir, tmp_path, names)
    tokenizer = Tokenizer.load(model_dir)
    texts = f"to be {names[0]}", "the question"  # a special token in a text is ordinary text
    parts = [tokenizer.encode(text, special=False) for text in texts]
    ids = (before, *parts[0], after, *parts[1], middle)
    assert before not in parts[0]
    async with running(model_dir) as engine:
        assert engine.card.fills_in
        expected, _ = await written(engine, TokenPrompt(ids))
        assert (await written(engine, InfillPrompt(*texts)))[0] == expected
        ends = {end: 100.0}
        assert await written(engine, InfillPrompt(*texts), logit_bias=ends) == ([end], "stop")
        assert (await written(engine, TokenPrompt(ids), logit_bias=ends))[1] == "length"


async def test_other_models_only_continue_text(plain_dir: Path):
    async with running(plain_dir) as engine:
        with pytest.raises(RequestError, match="suffix: the model only continues text") as caught:
            await written(engine, InfillPrompt("a", "b"))
    assert caught.value.param == "suffix"


async def test_a_special_token_among_the_stop_strings_ends_the_answer(
    plain_dir: Path, tmp_path: Path
):
    """Editors write the notation themselves, and name its tokens as stop strings."""
    model_dir, (before, *_, end) = with_tokens(plain_dir, tmp_path, QWEN)
    async with running(model_dir) as engine:
        biased = {"logit_bias": {before: 100.0}}
        prompt = TextPrompt(f"{QWEN[0]}to be{QWEN[1]}the question")
        assert (await written(engine, prompt, **biased))[1] == "length"
        assert await written(engine, prompt, stop=(QWEN[0],), **biased) == ([before], "stop")
        notation = TextPrompt(f"{QWEN[0]}to be{QWEN[1]}the question{QWEN[2]}")
        ended = await written(engine, notation, logit_bias={end: 100.0})
        assert ended == ([end], "stop")


async def cached(engine: LocalEngine, prompt: InfillPrompt, **fields: Any) -> int:
    """How many of the prompt's tokens were restored."""
    stream = await engine.open(Request(prompt, **{"max_tokens": 4, "ignore_eos": True, **fields}))
    [*_, last] = [delta async for delta in stream]
    assert last.finish is not None
    return last.finish.usage.cached_tokens


@pytest.mark.parametrize("family", tiny.FAMILIES)
async def test_prompts_share_all_that_precedes_what_is_begun(family: str, tmp_path: Path):
    """While a line is typed only it is computed, and other files are computed ahead of time."""
    saved = tiny.save(tiny.build(family), tmp_path / "saved")
    model_dir, _ = with_tokens(saved, tmp_path, QWEN)
    text, rest = "to be or not to be that is the question " * 8, "whether tis nobler " * 8
    files = (("a.py", "the slings and arrows of outrageous fortune " * 4),)
    async with running(model_dir) as engine:
        ahead = InfillPrompt("", "", files=files)
        num_files = len(await engine.tokens(Request(ahead))) - 3
        await cached(engine, ahead, max_tokens=0, keep_prefix=True)
        first = InfillPrompt(text, rest, files=files)
        assert await cached(engine, first) == num_files
        num_before = len(await engine.tokens(Request(first)))
        assert await cached(engine, replace(first, begun="wh")) >= num_before - 1


async def test_files_that_have_no_room_are_left_out(plain_dir: Path, tmp_path: Path):
    model_dir, _ = with_tokens(plain_dir, tmp_path, QWEN)
    files = tuple((f"{i}.py", "to be or not to be " * 20) for i in range(8))
    async with running(model_dir, max_ctx_tokens=512) as engine:
        stream = await engine.open(Request(InfillPrompt("a", "b", files=files), max_tokens=8))
        [*_, last] = [delta async for delta in stream]
    assert last.finish.reason in ("length", "stop")
    assert 0 < last.finish.num_left_out < 8
    assert last.finish.usage.prompt_tokens <= 512 - 8


@pytest.mark.parametrize(("least", "expected"), [(2, "a\n  b"), (3, "a"), (0, "a\n  b\nc")])
async def test_a_line_that_is_indented_too_little_ends_the_answer(
    plain_dir: Path, least: int, expected: str
):
    written = Constraint("regex", r"a\n  b\nc", "regex")
    async with running(plain_dir) as engine:
        request = Request(TextPrompt("x"), max_tokens=16, constraint=written, least_indent=least)
        deltas = [delta async for delta in await engine.open(request)]
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].finish.reason == "stop"
