"""A real engine after a failed pass: running requests end, later ones get the same tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from luceasync.config import CacheConfig, Config, DraftConfig, EngineConfig, ModelConfig
from luceasync.engine import thread as engine_thread
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.errors import StageFailed, Unavailable
from tests import tiny
from tests.engines import Answer, ask, user

DEADLINE_S = 20.0
LONG = "to be or not to be " * 20


@asynccontextmanager
async def running(
    model_dir: Path, draft_dir: Path | None, cache_dir: Path | None = None
) -> AsyncIterator[LocalEngine]:
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=model_dir, dtype="fp32"),
            engine=EngineConfig(max_ctx_tokens=512, parallel=2, prefill_chunk_tokens=64),
            draft=DraftConfig(draft_dir=draft_dir or "none", lookup="off"),
            cache=CacheConfig(cache_dir=cache_dir, min_tokens=1),
        )
    )
    async with engine:
        await engine.load()
        yield engine


class Fails:
    """Instead of a method of the target: from its call number `skip` on it raises `num_times`."""

    def __init__(self, engine: LocalEngine, kind: str, error: Exception, num_times: int, skip: int):
        self.target, self.kind, self.error = engine._pump.steps._target, kind, error
        self.left, self.skip = num_times, skip
        self.real = getattr(self.target, kind)
        setattr(self.target, kind, self)

    def __call__(self, *args, **fields):
        result = self.real(*args, **fields)  # what a pass has written is there when it fails
        self.skip -= 1
        if self.skip < 0 and self.left > 0:
            self.left -= 1
            raise self.error
        return result

    def heal(self) -> None:
        delattr(self.target, self.kind)


async def answers(engine: LocalEngine, texts: list[str]) -> list[Answer]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*(ask(engine, text, 12) for text in texts))


TEXTS = ["one", "two " + LONG, "three"]  # the last one waits for a lane


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize(
    ("kinds", "has_draft"),
    [(("prefill", "decode"), False), (("prefill", "verify", "commit"), True)],
)
async def test_a_pass_that_fails_once_ends_what_ran_and_changes_no_later_answer(
    tiny_dir, tmp_path, kinds, has_draft
):
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config()) if has_draft else None
    async with running(tiny_dir, draft_dir) as engine:
        told = [answer.ids for answer in await answers(engine, TEXTS)]
        for kind in kinds:
            failing = Fails(engine, kind, ZeroDivisionError("no way"), num_times=1, skip=2)
            broken = await answers(engine, [text + " again" for text in TEXTS])
            failing.heal()
            ended = [a.finish for a in broken if a.finish.reason == "error"]
            assert ended and all("ZeroDivisionError: no way" in f.error for f in ended)
            assert {f.error_kind for f in ended} == {"failed"}
            assert engine.status().ready
            assert [answer.ids for answer in await answers(engine, TEXTS)] == told, kind


@pytest.mark.slow
async def test_a_group_that_fails_ends_only_what_ran(tiny_dir):
    async with running(tiny_dir, None) as engine:
        told = await answers(engine, ["one", "two", "three"])
        error = StageFailed(0, "its process is gone")
        failing = Fails(engine, "decode", error, num_times=1, skip=3)
        found = await answers(engine, ["one", "two", "three"])
        failing.heal()
    # Which of them waits for a lane is not said, nor whether both that have one decode by then:
    # they are asked at once.
    ended = [answer for answer in found if answer.finish.reason == "error"]
    assert 1 <= len(ended) <= 2
    for answer in ended:
        assert answer.finish.error_kind == "unavailable"
        assert answer.finish.error == "stage 0 of the model failed: its process is gone"
    others = [pair for pair in zip(found, told, strict=True) if pair[0] not in ended]
    assert [waiting.ids for waiting, _ in others] == [alone.ids for _, alone in others]


async def test_what_a_failed_answer_computed_is_not_taken_up(tiny_dir):
    async with running(tiny_dir, None) as engine:
        Fails(engine, "decode", ZeroDivisionError("no way"), num_times=1, skip=5)
        [broken] = await answers(engine, [LONG])
        [again] = await answers(engine, [LONG])
    assert broken.finish.reason == "error"
    assert (again.finish.reason, again.num_cached) == ("length", 0)


@pytest.mark.any_family
@pytest.mark.slow
async def test_an_engine_that_cannot_decode_ends_all_requests_and_is_loaded_again(
    tiny_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(engine_thread, "FIRST_PAUSE_S", 0.05)
    may_load = threading.Event()
    # What this process has frozen stays so, and garbage is not looked for before it may load.
    held = {"unfreeze": lambda: may_load.wait(DEADLINE_S), "collect": lambda: None}
    monkeypatch.setattr(engine_thread, "gc", SimpleNamespace(**held))
    async with running(tiny_dir, None, tmp_path) as engine:
        [before] = await answers(engine, [LONG])
        await engine.flush()
        Fails(engine, "decode", ZeroDivisionError("no way"), num_times=10**9, skip=0)
        broken = await answers(engine, [f"question {i}" for i in range(7)])
        assert {a.finish.reason for a in broken} == {"error"}
        assert {a.finish.error_kind for a in broken} == {"failed", "unavailable"}
        status = engine.status()
        assert (status.ready, status.has_failed, status.retry_after_s >= 1) == (False, True, True)
        assert status.detail == "the engine failed: ZeroDivisionError: no way"
        with pytest.raises(Unavailable, match="ZeroDivisionError") as refused:
            await ask(engine, user("hello"))
        assert refused.value.retry_after_s == status.retry_after_s
        may_load.set()
        async with asyncio.timeout(DEADLINE_S):
            while not engine.status().ready:
                await asyncio.sleep(0.01)
        status = engine.status()
        assert (status.has_failed, status.restarts_total) == (False, 1)
        await engine.flush()  # the directory has been looked through again
        [after] = await answers(engine, [LONG])
    assert (after.ids, after.finish.restore.tier) == (before.ids, "disk")


@pytest.mark.any_family
async def test_a_shutdown_does_not_wait_for_an_engine_that_is_to_come_back(tiny_dir, monkeypatch):
    monkeypatch.setattr(engine_thread, "FIRST_PAUSE_S", 2 * DEADLINE_S)
    async with running(tiny_dir, None) as engine:
        Fails(engine, "decode", ZeroDivisionError("no way"), num_times=10**9, skip=0)
        await answers(engine, [f"question {i}" for i in range(7)])
        assert engine.status().has_failed
        ending = asyncio.timeout(DEADLINE_S)
        await ending.__aenter__()
    await ending.__aexit__(None, None, None)
    assert not ending.expired()
