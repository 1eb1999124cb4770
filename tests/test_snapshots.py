"""What was computed once is not computed again, and nobody can tell from the answer.

In float32, greedy: whatever serves a prompt, the same tokens follow.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import string
from pathlib import Path
from typing import Any

import pytest

from luceasync.disk_cache.codec import SUFFIXES, header_extent
from luceasync.engine.engine import LocalEngine
from luceasync.host_cache.nodes import Span
from luceasync.request import Sampling
from tests.engines import Answer, ask, running, user, written

pytestmark = pytest.mark.slow

NUM_TOKENS = 66  # more than a page
LONG = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 6
KEEP = {"keep_prefix": True}


@pytest.fixture(scope="module")
def cold(tiny_dir: Path) -> Answer:
    """The answer of a server that keeps nothing."""

    async def answer_twice() -> list[Answer]:
        async with running(tiny_dir, memory_bytes=0) as engine:
            return [await ask(engine, LONG, NUM_TOKENS) for _ in range(2)]

    answer, again = asyncio.run(answer_twice())
    assert answer.ids == again.ids
    assert again.num_prefilled == again.num_prompt_tokens
    return answer


def expect(answer: Answer, cold: Answer, tier: str | None, num_cached: int) -> None:
    assert answer.ids == cold.ids
    assert answer.finish.restore.tier == tier
    assert answer.num_cached == num_cached
    assert answer.num_prefilled == answer.num_prompt_tokens - num_cached


async def test_from_memory(tiny_dir, cold):
    async with running(tiny_dir) as engine:
        expect(await ask(engine, LONG, NUM_TOKENS), cold, None, 0)
        expect(await ask(engine, LONG, NUM_TOKENS), cold, "memory", cold.num_prompt_tokens)


async def test_from_the_disk_of_a_server_that_has_no_memory_for_it(tiny_dir, cold, tmp_path):
    async with running(tiny_dir, tmp_path, memory_bytes=0) as engine:
        expect(await ask(engine, LONG, NUM_TOKENS, **KEEP), cold, None, 0)
        await written(engine)
        expect(await ask(engine, LONG, NUM_TOKENS), cold, "disk", cold.num_prompt_tokens)


async def test_after_a_restart_under_another_split(tiny_dir, cold, tmp_path):
    async with running(tiny_dir, tmp_path) as engine:
        expect(await ask(engine, LONG, NUM_TOKENS, **KEEP), cold, None, 0)
    for shards in (1, 3):
        async with running(tiny_dir, tmp_path, shards=shards) as engine:
            expect(await ask(engine, LONG, NUM_TOKENS), cold, "disk", cold.num_prompt_tokens)


@pytest.mark.covered(1)
@pytest.mark.parametrize("shards", [2, 3])
async def test_and_back(tiny_dir, cold, tmp_path, shards: int):
    async with running(tiny_dir, tmp_path, shards=shards) as engine:
        expect(await ask(engine, LONG, NUM_TOKENS, **KEEP), cold, None, 0)
    async with running(tiny_dir, tmp_path) as engine:
        expect(await ask(engine, LONG, NUM_TOKENS), cold, "disk", cold.num_prompt_tokens)


async def test_with_four_lanes_at_once(tiny_dir, tmp_path):
    prompts, num_tokens = [f"{i} {LONG}" for i in range(4)], 24
    async with running(tiny_dir, memory_bytes=0) as engine:
        cold = [await ask(engine, prompt, num_tokens) for prompt in prompts]
    async with running(tiny_dir, tmp_path, parallel=4) as engine:
        first = await asyncio.gather(*(ask(engine, p, num_tokens, **KEEP) for p in prompts))
        second = await asyncio.gather(*(ask(engine, p, num_tokens) for p in prompts))
    async with running(tiny_dir, tmp_path, parallel=4, shards=2) as engine:
        third = await asyncio.gather(*(ask(engine, p, num_tokens) for p in prompts))
        assert engine.status().prefilled_tokens_total == 0
    for answers in (first, second, third):
        assert [answer.ids for answer in answers] == [answer.ids for answer in cold]


async def test_four_that_ask_the_same_at_once_are_one_prefill(tiny_dir, cold):
    async with running(tiny_dir, parallel=4) as engine:
        answers = await asyncio.gather(*(ask(engine, LONG, NUM_TOKENS) for _ in range(4)))
        assert engine.status().prefilled_tokens_total == cold.num_prompt_tokens
    assert {answer.ids for answer in answers} == {cold.ids}
    cached = sorted(answer.num_cached for answer in answers)
    assert cached == [0, *[cold.num_prompt_tokens] * 3]


@pytest.mark.any_family
async def test_another_model_of_the_same_shapes_takes_up_nothing(tiny_dir, family, tmp_path):
    from tests import tiny

    other_dir = tiny.save(tiny.build(family, seed=1), tmp_path / "other")
    async with running(tiny_dir, tmp_path / "cache") as engine:
        await ask(engine, LONG, NUM_TOKENS, **KEEP)
    async with running(other_dir) as engine:
        cold = await ask(engine, LONG, NUM_TOKENS)
    async with running(other_dir, tmp_path / "cache") as engine:
        expect(await ask(engine, LONG, NUM_TOKENS), cold, None, 0)


@pytest.mark.any_family
async def test_what_one_tenant_said_is_prefilled_for_another(tiny_dir, cold, tmp_path):
    async with running(tiny_dir, tmp_path) as engine:
        await ask(engine, LONG, NUM_TOKENS, tenant="one", **KEEP)
        expect(await ask(engine, LONG, NUM_TOKENS, tenant="two"), cold, None, 0)
    async with running(tiny_dir, tmp_path) as engine:
        expect(await ask(engine, LONG, NUM_TOKENS, tenant="three"), cold, None, 0)
        whole = cold.num_prompt_tokens
        expect(await ask(engine, LONG, NUM_TOKENS, tenant="one"), cold, "disk", whole)


# --- what a conversation costs ----------------------------------------------------------------


def content_bytes(cache_dir: Path) -> int:
    """Of all files, without their headers, which are small beside rows of no tiny model."""
    files = [path for suffix in SUFFIXES.values() for path in cache_dir.glob(f"*/*{suffix}")]
    contents = [path.read_bytes() for path in files]
    return sum(len(content) - header_extent(content, len(content)) for content in contents)


def needed_bytes(engine: LocalEngine, num_tokens: int, num_states: int) -> int:
    """Keys and values of the tokens, and the states."""
    assert engine._pump is not None
    sizes = engine._pump.lanes.prefixes._memory._target.sizes.of
    rows, _ = sizes(Span(0, num_tokens, with_state=False))
    _, state = sizes(Span(0, 1, with_state=True))
    return rows + num_states * state


@pytest.fixture
def long_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """The tiny model with a longer context."""
    path = shutil.copytree(tiny_dir, tmp_path / "long") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return path.parent


def in_letters(engine: LocalEngine) -> dict[str, Any]:
    """Of a random model: an answer that is text, and can be sent back as such."""
    encode = engine._language.tokenizer.encode
    bias = {encode(letter)[0]: 100.0 for letter in string.ascii_lowercase}
    return {"sampling": Sampling(logit_bias=bias)}


async def test_six_turns_write_and_run_what_they_add(long_dir, tmp_path):
    messages, known = [{"role": "system", "content": LONG}], 0
    async with running(long_dir, tmp_path / "cache", max_ctx_tokens=8192) as engine:
        for turn in range(6):
            messages += user(f"{turn}: " + LONG)
            answer = await ask(engine, messages, 40, **in_letters(engine))
            assert answer.num_cached == known
            assert answer.num_prefilled == answer.num_prompt_tokens - known
            known = answer.num_prompt_tokens + len(answer.ids) - 1
            messages.append({"role": "assistant", "content": answer.text})
        await written(engine)
        # A state where the answer is opened, and one at its end.
        assert content_bytes(tmp_path / "cache") <= 1.1 * needed_bytes(engine, known, 12)


async def test_five_branches_of_an_agent_share_its_beginning(long_dir, tmp_path):
    system = {"role": "system", "content": "Tools: " + 4 * LONG}
    num_new = 0
    async with running(long_dir, tmp_path / "cache", max_ctx_tokens=8192) as engine:
        for branch in range(5):
            messages = [system, *user(f"{branch}: " + LONG)]
            answer = await ask(engine, messages, 40, **in_letters(engine))
            num_new += answer.num_prefilled + len(answer.ids) - 1
            if branch:
                assert answer.num_prefilled < 0.4 * answer.num_prompt_tokens
                assert answer.num_cached >= len(engine._language.tokenizer.encode(4 * LONG))
        await written(engine)
        assert content_bytes(tmp_path / "cache") <= 1.1 * needed_bytes(engine, num_new, 6)
