"""Requests of many kinds, and what an engine over a tiny model answers to them, with and without
speculation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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
from luceasync.engine.load import DecodeWith, speculate
from luceasync.engine.start import build_engine
from luceasync.request import ChatPrompt, Constraint, Finish, Request, Sampling

SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
    "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}},
    "required": ["name", "tags"], "additionalProperties": false}"""
LOOP: dict[str, Any] = {"sampling": Sampling(logit_bias={70: 50.0}), "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    LOOP,  # the tiny models seldom repeat themselves
    {"ignore_eos": True},
    {"sampling": Sampling(temperature=1.0, seed=4), "ignore_eos": True},
    {"sampling": Sampling(repetition_penalty=1.3, presence_penalty=0.4), "top_logprobs": 2},
    {"stop": ("a", "e"), "sampling": Sampling(temperature=1.0, seed=9)},
    {"sampling": Sampling(temperature=0.9, top_p=0.9, seed=1), "num_choices": 2},
    {"constraint": Constraint("json_schema", SCHEMA, "response_format"), "max_tokens": 60},
    {"max_tokens": 9, "top_logprobs": 0},
]
TEXTS = [f"a list: {'one two three, ' * 3}and question {i}" for i in range(len(REQUESTS))]


@asynccontextmanager
async def started(
    model_dir: Path,
    decode_with: DecodeWith = speculate,
    *,
    num_shards: int = 1,
    placement: PlacementConfig | None = None,
    parallel: int = 4,
    cache: CacheConfig | None = None,
    kvflash: KvFlashConfig | None = None,
    **draft: Any,
) -> AsyncIterator[LocalEngine]:
    shards = PlacementConfig(devices=tuple(f"cpu:{i}" for i in range(num_shards)))
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=model_dir, dtype="fp32"),
            placement=placement or shards,
            engine=EngineConfig(max_ctx_tokens=512, parallel=parallel),
            cache=cache or CacheConfig(),
            draft=DraftConfig(**draft),
            kvflash=kvflash or KvFlashConfig(),
        ),
        decode_with=decode_with,
    )
    async with engine:
        await engine.load()
        yield engine


Told = list[tuple[tuple[int, ...], str, tuple[Any, ...]]]  # of each choice


async def ask(engine: LocalEngine, text: str, **fields: Any) -> tuple[Told, list[Finish]]:
    request = Request(
        ChatPrompt([{"role": "user", "content": text}]), **{"max_tokens": 40, **fields}
    )
    num = request.num_choices
    ids: list[list[int]] = [[] for _ in range(num)]
    logprobs: list[list[Any]] = [[] for _ in range(num)]
    texts, finishes = [""] * num, {}
    async for delta in await engine.open(request):
        ids[delta.index] += delta.token_ids
        texts[delta.index] += delta.text
        logprobs[delta.index] += [(p.token, round(p.logprob, 3)) for p in delta.logprobs]
        if delta.finish is not None:
            finishes[delta.index] = delta.finish
    told = [
        (tuple(ids[i]), f"{texts[i]} ({finishes[i].reason})", tuple(logprobs[i]))
        for i in range(num)
    ]
    return told, [finishes[i] for i in range(num)]


async def ask_all(engine: LocalEngine) -> list[Told]:
    pairs = zip(TEXTS, REQUESTS, strict=True)
    return [told for told, _ in await asyncio.gather(*(ask(engine, t, **f) for t, f in pairs))]
