"""Engines whose drafter is in a process of its own say what plain ones say, also when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from luceasync.config import CacheConfig, Config, DraftConfig, EngineConfig, ModelConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from tests import tiny
from tests.children import children
from tests.engine.test_processes import LONG, NUM_ALONE, backends
from tests.engine.test_speculation import ask_all
from tests.engines import ask, written
from tests.processes import backend_program, placed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_family,
    pytest.mark.usefixtures("forked_backends"),
]

TREE = {"ddtree": True, "ddtree_budget": 12}


@asynccontextmanager
async def running(
    model_dir: Path,
    folder: Path,
    arrangement: str = "one",
    *,
    transport: str = "auto",
    cache_dir: Path | None = None,
    is_remote: bool = True,
    **draft,
) -> AsyncIterator[LocalEngine]:
    folder.mkdir(exist_ok=True)
    (folder / "drafter").mkdir(exist_ok=True)
    if is_remote:
        program = backend_program(folder / "drafter", ["hip:5=cpu:0"])
        draft |= {"device": "hip:5", "ipc_bin": program}
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=model_dir, dtype="fp32"),
            placement=placed(folder, arrangement, transport),
            engine=EngineConfig(parallel=4, max_ctx_tokens=1024, prefill_chunk_tokens=128),
            cache=CacheConfig(
                memory_bytes=1 << 26,
                cache_dir=cache_dir,
                budget_bytes=1 << 30 if cache_dir else None,
                min_tokens=1,
            ),
            draft=DraftConfig(lookup="off", **draft),
        )
    )
    async with engine:
        await engine.load()
        yield engine


@pytest.fixture(scope="module")
def plain(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list:
    """What is said without a drafter."""

    async def said() -> list:
        folder = tmp_path_factory.mktemp("plain")
        async with running(tiny_dir, folder, is_remote=False, draft_dir="none") as engine:
            return await ask_all(engine, NUM_ALONE)

    return asyncio.run(said())


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    return tiny.save_draft(tmp_path / "draft", tiny.draft_config())


@pytest.fixture
def bundled() -> dict:
    """The bundled model, whose drafter is often right."""
    config = Config()
    return {"model_dir": config.model.model_dir, "draft_dir": config.drafter_dir}


@pytest.mark.covered(1)
@pytest.mark.parametrize(
    ("arrangement", "transport", "tree"),
    [
        ("one", "shared", TREE),
        ("one", "stream", {}),
        ("two", "stream", TREE),
        ("three", "shared", {}),
        ("between", "shared", TREE),
        ("between", "stream", {}),
    ],
)
async def test_answers_are_those_without_a_drafter(
    tiny_dir, draft_dir, tmp_path, arrangement, transport, tree, plain
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
        status = engine.status().speculation
        assert status.rounds_total > 0 and status.off_reason is None
    assert backends() == []


@pytest.mark.parametrize("is_remote", [True, False])
async def test_a_selector_chooses_among_tokens_of_a_head_elsewhere(
    tiny_dir, tmp_path, plain, is_remote
):
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config(**tiny.DFLASH2))
    there = running(
        tiny_dir, tmp_path / "several", "three", draft_dir=draft_dir, is_remote=is_remote
    )
    async with there as engine:
        assert await ask_all(engine, NUM_ALONE) == plain
        assert engine.status().speculation.rounds_total > 0
    assert backends() == []


@pytest.mark.covered(1)
@pytest.mark.parametrize(
    ("transport", "first", "second", "num_words"),
    [
        ("shared", False, True, 130),
        ("stream", True, False, 40),
        ("shared", True, True, 40),
        ("stream", True, True, 130),
    ],
)
async def test_a_restart_speculates_from_kept_features(
    bundled, tmp_path, transport, first, second, num_words, caplog
):
    text = "Say hello to " + "the world " * num_words
    model_dir, draft = bundled["model_dir"], {"draft_dir": bundled["draft_dir"]}
    kept = {"cache_dir": tmp_path / "cache", "transport": transport, **draft}
    arrangement = "between" if second else "one"
    async with running(model_dir, tmp_path / "first", "one", is_remote=first, **kept) as engine:
        expected = (await ask(engine, text)).ids
        await written(engine)
    caplog.set_level(logging.DEBUG, "luceasync.prefix_cache.cache")
    there = running(model_dir, tmp_path / "second", arrangement, is_remote=second, **kept)
    async with there as engine:
        after = await ask(engine, text)
        again = await ask(engine, text)
    assert after.ids == again.ids == expected
    assert (after.finish.restore.tier, again.finish.restore.tier) == ("disk", "memory")
    told = f"local_shards={2 if second else 3} remote_shards={1 if second else 0} tier=disk"
    assert any(told in record.getMessage() for record in caplog.records)
    for answer in (after, again):
        assert answer.finish.speculation.accepted > 0


def drafters() -> list[psutil.Process]:
    """Processes that have a drafter."""
    return children("--draft-dir")


async def until(engine: LocalEngine, *, off: bool) -> None:
    async with asyncio.timeout(60):
        while (engine.status().speculation.off_reason is not None) != off:
            await asyncio.sleep(0.05)


@pytest.mark.covered(1)
@pytest.mark.parametrize("transport", ["shared", "stream"])
async def test_one_that_is_killed_in_an_answer_costs_no_request(
    tiny_dir, draft_dir, tmp_path, transport
):
    texts = [f"{i} {LONG}" for i in range(3)]
    async with running(tiny_dir, tmp_path / "one", is_remote=False, draft_dir="none") as engine:
        plain = await asyncio.gather(*(ask(engine, text, num_tokens=60) for text in texts))
    there = running(tiny_dir, tmp_path / "there", draft_dir=draft_dir, transport=transport)
    async with there as engine:
        [victim] = drafters()
        asking = [asyncio.create_task(ask(engine, text, num_tokens=60)) for text in texts]
        while engine.status().speculation.rounds_total < 3:
            await asyncio.sleep(0.005)
        os.kill(victim.pid, signal.SIGKILL)
        answers = await asyncio.gather(*asking)
        assert [answer.ids for answer in answers] == [answer.ids for answer in plain]
        assert {answer.finish.reason for answer in answers} == {"length"}
        await until(engine, off=False)
        assert len(drafters()) == 1 and drafters() != [victim]
        num_rounds = engine.status().speculation.rounds_total
        # Streamed, what the drafter knew of the others went with its process.
        again = await ask(engine, f"9 {LONG}", num_tokens=20)
        assert again.finish.speculation.rounds > 0
        assert engine.status().speculation.rounds_total > num_rounds
    assert drafters() == []


@pytest.mark.covered(0)
async def test_a_dead_drafter_is_reported_and_no_answer_waits_for_it(tiny_dir, draft_dir, tmp_path):
    folder = tmp_path / "there"
    async with running(tiny_dir, folder, draft_dir=draft_dir) as engine:
        first = await ask(engine, LONG, num_tokens=40)
        (folder / "drafter" / "luceasync-backend").write_text("#!/bin/sh\nexit 3\n")
        [victim] = drafters()
        os.kill(victim.pid, signal.SIGKILL)
        await until(engine, off=True)
        second = await ask(engine, LONG, num_tokens=40)
        assert second.ids == first.ids
        assert second.finish.speculation.rounds == 0
        told = second.finish.speculation.off_reason
        assert told.startswith("the drafter is gone: ") and "SIGKILL" in told
        assert engine.status().ready
