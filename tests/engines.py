"""Engines over tiny models and cache directories, and what one sees of their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import ChatPrompt, Finish, Request


@dataclass(frozen=True)
class Answer:
    """`num_prefilled`: what the engine has run while it was given."""

    ids: tuple[int, ...]
    text: str
    finish: Finish
    num_prefilled: int

    @property
    def num_cached(self) -> int:
        return self.finish.usage.cached_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.finish.usage.prompt_tokens


@asynccontextmanager
async def running(
    model_dir: Path,
    cache_dir: Path | None = None,
    *,
    shards: int = 1,
    parallel: int = 2,
    max_ctx_tokens: int = 2048,
    draft: DraftConfig | None = None,
    **cache: Any,
) -> AsyncIterator[LocalEngine]:
    """In float32 on the CPU, over `cache_dir`; everything is worth a file."""
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=model_dir, dtype="fp32"),
            placement=PlacementConfig(devices=tuple(f"cpu:{i}" for i in range(shards))),
            engine=EngineConfig(
                parallel=parallel, max_ctx_tokens=max_ctx_tokens, prefill_chunk_tokens=128
            ),
            draft=draft or DraftConfig(),
            cache=CacheConfig(
                **{
                    "cache_dir": cache_dir,
                    "budget_bytes": 1 << 30 if cache_dir else None,
                    "memory_bytes": 1 << 28,
                    "min_tokens": 1,
                    **cache,
                }
            ),
        )
    )
    async with engine:
        await engine.load()
        yield engine


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def ask(
    engine: LocalEngine, messages: Sequence[dict[str, Any]] | str, num_tokens: int = 32, **fields
) -> Answer:
    """A greedy answer of that many tokens."""
    before = engine.status().prefilled_tokens_total
    listed = user(messages) if isinstance(messages, str) else list(messages)
    fields = {"max_tokens": num_tokens, "ignore_eos": True, **fields}
    stream = await engine.open(Request(ChatPrompt(listed), **fields))
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish is not None
    return Answer(
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        deltas[-1].finish,
        engine.status().prefilled_tokens_total - before,
    )


async def written(engine: LocalEngine) -> None:
    """Wait until the disk has what it is to have, as the end of a server does."""
    await engine.flush()
