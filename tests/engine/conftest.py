"""A running engine over a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from luceasync.config import Config, EngineConfig, ModelConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.prepare import PreparedChoice
from luceasync.engine.start import build_engine
from tests.engine.choices import make_choice
from tests.engine.pumps import letters

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


@pytest.fixture
def make_prepared() -> Callable[..., PreparedChoice]:
    """`make_prepared(stream_id, prompt, max_tokens, stop, **fields)`: a choice for a pump; `fields`
    as in tests.engine.choices.make_choice.
    """
    tokenizer = letters()

    def make(
        stream_id: int,
        prompt: Sequence[int],
        max_tokens: int = 3,
        stop: int | None = None,
        **fields: Any,
    ) -> PreparedChoice:
        stop_ids = frozenset() if stop is None else frozenset({stop})
        return make_choice(
            prompt,
            tokenizer=tokenizer,
            stream_id=stream_id,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            **fields,
        )

    return make
