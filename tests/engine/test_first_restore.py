"""The first prompt after a restart is restored or run again by rates that were measured before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from luceasync.config import CacheConfig, Config, EngineConfig, ModelConfig
from luceasync.disk_cache import files
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.prefix_cache import disk_worker
from luceasync.prefix_tree import cost
from luceasync.request import ChatPrompt, Finish, Request, Sampling

Open = Callable[[], AbstractAsyncContextManager[LocalEngine]]
PROMPT = ChatPrompt([{"role": "user", "content": "to be or not to be, that is the question " * 20}])


@pytest.fixture
def serve(tiny_dir: Path, tmp_path: Path) -> Open:
    """`async with serve() as engine`: always on the same cache directory."""
    config = Config(
        model=ModelConfig(model_dir=tiny_dir, dtype="fp32"),
        engine=EngineConfig(max_ctx_tokens=1024, parallel=1),
        cache=CacheConfig(memory_bytes=2**26, cache_dir=tmp_path / "cache", min_tokens=64),
    )

    @asynccontextmanager
    async def open_engine() -> AsyncIterator[LocalEngine]:
        async with build_engine(config) as engine:
            await engine.load()
            await engine.flush()  # also waits until the disk is measured
            yield engine

    return open_engine


async def finish_of(engine: LocalEngine) -> Finish:
    request = Request(PROMPT, Sampling(temperature=0.0), max_tokens=2, ignore_eos=True)
    *_, last = [delta async for delta in await engine.open(request)]
    assert last.finish is not None
    return last.finish


@pytest.mark.slow
@pytest.mark.any_family
@pytest.mark.parametrize(
    ("least_bytes", "decisions"),
    [
        (1, {"restore_is_faster", "prefill_is_faster"}),
        (1 << 40, {"not_measured"}),  # no file is large enough to tell
    ],
)
async def test_the_disk_is_measured_before_the_first_prompt(
    serve: Open, least_bytes: int, decisions: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_worker, "LEAST_MEASURED_BYTES", least_bytes)
    monkeypatch.setattr(files, "MEASURED_FROM_BYTES", 0)
    for rate in ("disk_bytes_per_s", "prefill_tokens_per_s"):  # a loaded machine times 16 tokens
        monkeypatch.setitem(cost.LEAST, rate, 1)
    async with serve() as engine:
        assert (await finish_of(engine)).restore.decision is None
    async with serve() as engine:
        assert (await finish_of(engine)).restore.decision in decisions
