"""A running engine over a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from luceasync.config import Config, EngineConfig, ModelConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine

StartEngine = Callable[..., AbstractAsyncContextManager[LocalEngine]]


@pytest.fixture
def start_engine(tiny_dir: Path) -> StartEngine:
    """`async with start_engine(parallel=2) as engine`: loaded, in float32 on the CPU."""

    @asynccontextmanager
    async def start(**sizes: int) -> AsyncIterator[LocalEngine]:
        engine = build_engine(
            Config(
                model=ModelConfig(model_dir=tiny_dir, dtype="fp32"),
                engine=EngineConfig(**{"max_ctx_tokens": 512, **sizes}),
            )
        )
        async with engine:
            await engine.load()
            yield engine

    return start
