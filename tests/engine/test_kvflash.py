"""Engines whose lanes keep a part of their context on devices, and what their prefixes become."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.errors import PlacementError, RequestError
from luceasync.request import Finish, Request, Sampling, TokenPrompt
from tests import tiny
from tests.engines import written
from tests.processes import placed

pytestmark = pytest.mark.usefixtures("forked_backends")

POOL = 512


@asynccontextmanager
async def running(
    model_dir: Path,
    cache_dir: Path | None = None,
    *,
    shards: int = 1,
    memory_bytes: int = 1 << 28,
    parallel: int = 2,
    draft_dir: Path | str = "none",
    placement: PlacementConfig | None = None,
    **kvflash: Any,
) -> AsyncIterator[LocalEngine]:
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=model_dir, dtype="fp32"),
            placement=placement
            or PlacementConfig(devices=tuple(f"cpu:{i}" for i in range(shards))),
            engine=EngineConfig(parallel=parallel, max_ctx_tokens=2048, prefill_chunk_tokens=128),
            cache=CacheConfig(
                cache_dir=cache_dir,
                budget_bytes=1 << 30 if cache_dir else None,
                memory_bytes=memory_bytes,
                min_tokens=1,
            ),
            draft=DraftConfig(draft_dir=draft_dir),
            kvflash=KvFlashConfig(**kvflash),
        )
    )
    async with engine:
        await engine.load()
        yield engine


async def said(
    engine: LocalEngine, prompt: Sequence[int], num_tokens: int, **fields: Any
) -> tuple[list[int], Finish]:
    """A greedy answer of that many tokens."""
    request = Request(
        TokenPrompt(tuple(prompt)),
        Sampling(temperature=0),
        max_tokens=num_tokens,
        ignore_eos=True,
        **fields,
    )
    deltas = [delta async for delta in await engine.open(request)]
    finish = deltas[-1].finish
    assert finish is not None
    return [token for delta in deltas for token in delta.token_ids], finish


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, tiny.VOCAB_SIZE), k=num_tokens)


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("policy", ["qk", "lru"])
async def test_three_turns_restore_what_the_turns_before_have_computed(tiny_dir: Path, policy):
    async with running(tiny_dir, pool_tokens=POOL, policy=policy) as engine:
        history = tokens(1400)
        for turn in range(3):
            answer, finish = await said(engine, history, 20)
            assert finish.reason == "length" and finish.residence is not None
            assert finish.residence.resident_tokens <= POOL
            assert finish.residence.absent_tokens >= len(history) - POOL
            if turn:
                assert finish.usage.cached_tokens >= 0.97 * (len(history) - 100)
            history += answer + tokens(80, turn)
        await engine.flush()
        status = engine.status().residence
        assert status is not None and status.evicted_total > 0
        assert (status.looks_total > 0) == (policy == "qk")
        assert status.own_bytes == 0 and status.absent_tokens == 0  # lanes are empty


@pytest.mark.slow
async def test_a_server_that_holds_everything_goes_on_from_nodes_of_one_that_does_not(
    tiny_dir: Path, tmp_path: Path
):
    prompt = tokens(1500)
    async with running(tiny_dir, tmp_path / "cache", pool_tokens=POOL) as engine:
        await said(engine, prompt, 40)
        await written(engine)
    async with running(tiny_dir) as engine:
        cold, _ = await said(engine, prompt + tokens(50, 1), 40)
    async with running(tiny_dir, tmp_path / "cache") as engine:
        warm, finish = await said(engine, prompt + tokens(50, 1), 40)
    assert warm == cold and finish.usage.cached_tokens >= 1400


@pytest.mark.slow
async def test_what_was_decoded_while_chunks_were_absent_is_run_again(tiny_dir: Path):
    async with running(tiny_dir, pool_tokens=POOL) as engine:
        prompt = tokens(1000)
        answer, _ = await said(engine, prompt, 30)
        _, finish = await said(engine, prompt + answer + tokens(20, 2), 5)
        assert finish.usage.cached_tokens <= len(prompt)


@pytest.mark.slow
async def test_an_answer_that_outgrows_its_pool_goes_on(tiny_dir: Path):
    """Its first tokens, which all of the context was there for, are kept."""
    async with running(tiny_dir, pool_tokens=POOL, policy="lru") as engine:
        prompt = tokens(200)
        answer, finish = await said(engine, prompt, 400)
        assert len(answer) == 400 and finish.residence.evicted > 0
        _, again = await said(engine, prompt + answer + tokens(10, 3), 5)
        is_hybrid = "3_5" in (tiny_dir / "config.json").read_text()
        assert again.usage.cached_tokens >= (190 if is_hybrid else 450)


@pytest.mark.slow
async def test_lanes_beside_each_other_say_what_they_say_alone(tiny_dir: Path):
    import asyncio

    prompts = [tokens(n, n) for n in (900, 700, 1300)]
    async with running(tiny_dir, pool_tokens=POOL, policy="lru", parallel=3) as engine:
        alone = [(await said(engine, prompt, 24))[0] for prompt in prompts]
    async with running(tiny_dir, pool_tokens=POOL, policy="lru", parallel=3) as engine:
        found = await asyncio.gather(*(said(engine, prompt, 24) for prompt in prompts))
    assert [answer for answer, _ in found] == alone


@pytest.mark.covered(1)
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "stream"])
async def test_groups_in_other_processes_follow_the_same_map(
    tiny_dir: Path, tmp_path: Path, transport: str
):
    found = []
    for arrangement in ("one", "three"):
        folder = tmp_path / arrangement
        folder.mkdir()
        where = placed(folder, arrangement, transport)
        async with running(tiny_dir, placement=where, pool_tokens=POOL, tau_tokens=16) as engine:
            first, _ = await said(engine, tokens(900), 40)
            again, finish = await said(engine, [*tokens(900), *first, *tokens(60, 5)], 20)
            found.append((first, again, finish.residence, finish.usage.cached_tokens >= 890))
    assert found[0] == found[1] and found[0][3]


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    return tiny.save_draft(tmp_path / "draft", tiny.draft_config())


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("policy", ["qk", "drafter"])
async def test_speculation_says_what_plain_decoding_says(
    tiny_dir: Path, draft_dir: Path, policy: str
):
    """As long as no chunk moves: 54 tokens are left in the last one."""
    prompt, answers = tokens(970), []
    for drafter in ("none", "lookup", draft_dir):
        chosen = "lru" if policy == "drafter" and drafter != draft_dir else policy
        async with running(tiny_dir, draft_dir=drafter, pool_tokens=POOL, policy=chosen) as engine:
            answer, finish = await said(engine, prompt, 24)
            answers.append(answer)
            status = engine.status().residence
            assert (status.looks_total > 0) == (chosen != "lru")
    if policy == "qk":
        assert answers[0] == answers[1] == answers[2]
    assert finish.speculation is not None and finish.speculation.rounds > 0


@pytest.mark.slow
@pytest.mark.covered(0)
async def test_a_request_for_which_there_is_no_host_memory_ends_alone(tiny_dir: Path):
    async with running(tiny_dir, pool_tokens=POOL, policy="lru") as engine:
        pump = engine._pump
        assert pump is not None
        lanes = pump.lanes.paging
        keep, lanes._keep = lanes._keep, lambda save, num_bytes: False
        prompt = tokens(120)
        answer, finish = await said(engine, prompt, 420)  # it grows out of the pool
        assert (finish.reason, finish.error_kind) == ("error", "kv_host_memory")
        assert "--prefix-cache-memory" in finish.error and len(answer) < 420
        lanes._keep = keep
        _, finish = await said(engine, prompt, 420)
        assert finish.reason == "length"


@pytest.mark.any_family
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pool_tokens": 128}, "--kvflash 128: at least 448"),
        ({"pool_tokens": POOL, "policy": "drafter"}, "--kvflash-policy drafter: "),
        ({"pool_tokens": POOL, "pins": ((0, 1000),)}, "--kvflash-pin-spans 0:1000: "),
        ({"pool_tokens": POOL, "memory_bytes": 1 << 16}, "--prefix-cache-memory 65536: "),
    ],
)
async def test_what_cannot_be_is_refused_at_the_start(tiny_dir: Path, fields, words: str):
    with pytest.raises(PlacementError, match=words):
        async with running(tiny_dir, **fields):
            pass


@pytest.mark.any_family
@pytest.mark.slow
async def test_a_request_pins_tokens_and_an_error_says_how_many_fit(tiny_dir: Path):
    async with running(tiny_dir, pool_tokens=POOL, policy="lru") as engine:
        prompt = tokens(1200)
        _, finish = await said(engine, prompt, 3, pins=((100, 120),))
        assert finish.reason == "length"
        for pins, words in ((((0, 1300),), "goes beyond"), (((64, 1000),), "64 fit")):
            with pytest.raises(RequestError, match=words) as caught:
                await said(engine, prompt, 3, pins=pins)
            assert caught.value.param == "kvflash_pin"
        with pytest.raises(RequestError, match="system message"):
            await said(engine, prompt, 3, pins="system")
