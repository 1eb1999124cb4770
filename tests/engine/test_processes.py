"""Engines whose layers are in several processes say what one process says, and come back."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.load import Rehearsal, rehearse
from luceasync.engine.start import build_engine
from luceasync.errors import Unavailable
from tests import tiny
from tests.children import children
from tests.engine.test_speculation import ask_all
from tests.engines import ask, written
from tests.processes import placed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_backends")]

LONG = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 6


@asynccontextmanager
async def running(
    model_dir: Path,
    folder: Path,
    arrangement: str,
    *,
    transport: str = "auto",
    cache_dir: Path | None = None,
    max_queue: int = 64,
    pool_tokens: int | None = None,
    **draft,
) -> AsyncIterator[LocalEngine]:
    folder.mkdir(exist_ok=True)
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=model_dir, dtype="fp32"),
            placement=placed(folder, arrangement, transport),
            engine=EngineConfig(
                parallel=4, max_ctx_tokens=1024, prefill_chunk_tokens=128, max_queue=max_queue
            ),
            cache=CacheConfig(
                memory_bytes=1 << 26,
                cache_dir=cache_dir,
                budget_bytes=1 << 30 if cache_dir else None,
                min_tokens=1,
            ),
            draft=DraftConfig(**draft),
            kvflash=KvFlashConfig(pool_tokens=pool_tokens),
        )
    )
    async with engine:
        await engine.load()
        yield engine


NUM_ALONE = 2  # of the requests: steps of one lane


@pytest.fixture(scope="module")
def plain(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list:
    """What one process says without a drafter."""

    async def said() -> list:
        async with running(tiny_dir, tmp_path_factory.mktemp("plain"), "one") as engine:
            return await ask_all(engine, NUM_ALONE)

    return asyncio.run(said())


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    return tiny.save_draft(tmp_path / "draft", tiny.draft_config())


@pytest.mark.covered(1)
@pytest.mark.parametrize("transport", ["shared", "stream"])
@pytest.mark.parametrize("tree", [{}, {"ddtree": True, "ddtree_budget": 12}], ids=["chain", "tree"])
@pytest.mark.parametrize("arrangement", ["three", "between"])
async def test_answers_are_those_of_one_process(
    tiny_dir, draft_dir, tmp_path, arrangement, tree, transport, plain
):
    there = running(
        tiny_dir,
        tmp_path / "several",
        arrangement,
        transport=transport,
        draft_dir=draft_dir,
        **tree,
    )
    async with there as engine:
        assert await ask_all(engine, NUM_ALONE) == plain
        assert engine.status().speculation.rounds_total > 0


@pytest.mark.covered(1)
@pytest.mark.parametrize(("first", "second"), [("one", "three"), ("between", "one")])
@pytest.mark.parametrize("transport", ["shared", "stream"])
async def test_a_restart_takes_up_what_another_arrangement_has_written(
    tiny_dir, tmp_path, first, second, transport, caplog
):
    cache_dir = tmp_path / "cache"
    kept = {"cache_dir": cache_dir, "transport": transport}
    async with running(tiny_dir, tmp_path / "first", first, **kept) as engine:
        answer = await ask(engine, LONG)
        await written(engine)
    caplog.set_level(logging.DEBUG, "luceasync.prefix_cache.cache")
    async with running(tiny_dir, tmp_path / "second", second, **kept) as engine:
        again = await ask(engine, LONG)
    assert again.ids == answer.ids
    assert again.num_cached > answer.num_prompt_tokens - 64  # the end of the turn
    shards = {"one": (3, 0), "two": (1, 2), "three": (1, 2)}[second]
    told = f"local_shards={shards[0]} remote_shards={shards[1]} tier=disk"
    assert any(told in record.getMessage() for record in caplog.records)


def backends() -> list[psutil.Process]:
    """Processes that this one has started for stages."""
    return children("luceasync.backend")


def kill_first() -> None:
    """The one that was started first: with --groups there are more."""
    min(backends(), key=lambda process: process.create_time()).send_signal(signal.SIGKILL)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.02)


@pytest.mark.any_family
@pytest.mark.covered(1)
@pytest.mark.parametrize("transport", ["shared", "stream"])
@pytest.mark.parametrize("is_busy", [True, False], ids=["in an answer", "idle"])
async def test_a_process_that_dies_fails_what_it_carried_and_is_started_again_alone(
    tiny_dir, tmp_path, monkeypatch, may_start, is_busy, transport
):
    rehearsed: list[Rehearsal] = []

    def counted(target, decoding, tokenizer, part: Rehearsal) -> None:
        rehearsed.append(part)
        rehearse(target, decoding, tokenizer, part)

    monkeypatch.setattr("luceasync.engine.load.rehearse", counted)
    there = running(
        tiny_dir, tmp_path / "several", "three", transport=transport, cache_dir=tmp_path / "cache"
    )
    async with there as engine:
        before = await ask(engine, LONG)
        await written(engine)
        first, last = sorted(backends(), key=lambda process: process.create_time())
        if is_busy:
            num_decoded = engine.status().decoded_tokens_total
            asking = asyncio.create_task(ask(engine, "more", num_tokens=800))
            await until(lambda: engine.status().decoded_tokens_total > num_decoded)
        may_start.clear()
        last.send_signal(signal.SIGKILL)
        if is_busy:
            finish = (await asking).finish
            assert (finish.reason, finish.error_kind) == ("error", "unavailable")
            assert "stage 2 of the model failed" in finish.error
            assert "SIGKILL; its last lines" in finish.error
        await until(lambda: engine.status().processes.away is not None)
        status = engine.status()
        assert status.ready  # requests wait now
        away = status.processes.away
        assert (away.name, away.devices) == ("group 2 of the model", ("cuda:0",))
        may_start.set()
        after = await ask(engine, LONG)
        status = engine.status()
        assert (status.processes.away, status.restarts_total) == (None, 0)
        assert [process.num_starts for process in status.processes.all] == [1, 2]
        assert len(rehearsed) == 2  # before it is of use again, as before the first request
        assert first in backends() and last not in backends()
    assert after.ids == before.ids
    assert after.num_cached > before.num_prompt_tokens - 64
    assert after.finish.restore.tier == ("memory" if transport == "shared" else "disk")
    assert backends() == []


@pytest.mark.covered(0)
@pytest.mark.parametrize("pool_tokens", [None, 448], ids=["all here", "pool"])
async def test_requests_waiting_when_a_process_dies_are_served_afterwards(
    tiny_dir, tmp_path, pool_tokens
):
    texts = [f"question {i}" for i in range(7)]  # four of them have a lane
    there = running(tiny_dir, tmp_path / "several", "two", pool_tokens=pool_tokens)
    async with there as engine:
        told = await asyncio.gather(*(ask(engine, text, num_tokens=120) for text in texts))
        asking = [asyncio.create_task(ask(engine, text, num_tokens=120)) for text in texts]
        await until(lambda: engine.status().num_running == 4)
        kill_first()
        answers = await asyncio.gather(*asking)
    assert [answer.finish.reason for answer in answers].count("error") == 4
    for answer, before in zip(answers, told, strict=True):
        assert answer.finish.reason == "error" or answer.ids == before.ids


@pytest.mark.covered(0)
async def test_a_queue_that_fills_while_a_process_is_away_says_when_to_come_back(
    tiny_dir, tmp_path, may_start
):
    async with running(tiny_dir, tmp_path / "several", "two", max_queue=1) as engine:
        may_start.clear()
        kill_first()
        await until(lambda: engine.status().processes.away is not None)
        waiting = [asyncio.create_task(ask(engine, f"question {i}")) for i in range(5)]
        await until(lambda: sum(engine._admission._num_held.values()) == 5)
        with pytest.raises(Unavailable, match="group 1 of the model") as refused:
            await ask(engine, "one too many")
        assert refused.value.retry_after_s >= 1
        may_start.set()
        assert {(await each).finish.reason for each in waiting} == {"length"}


@pytest.mark.covered(0)
async def test_an_end_while_a_process_is_away_comes_soon(tiny_dir, tmp_path):
    async with running(tiny_dir, tmp_path / "several", "two") as engine:
        [program] = (tmp_path / "several").glob("luceasync-backend")
        program.write_text("#!/bin/sh\nexit 1\n")
        kill_first()
        await until(lambda: engine.status().processes.all[0].num_starts >= 3)
        ending = asyncio.timeout(20)
        await ending.__aenter__()
    await ending.__aexit__(None, None, None)
    assert backends() == []
