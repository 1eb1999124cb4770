"""System prompts that differ in their last line: the third prefills only the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from luceasync.config import CacheConfig, Config, EngineConfig, ModelConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.request import ChatPrompt, Delta, Request, Sampling
from luceasync.text.tokenizer import Tokenizer

Open = Callable[..., AbstractAsyncContextManager[LocalEngine]]
RULES = "to be or not to be, that is the question " * 50


def chat(who: str) -> ChatPrompt:
    """A first turn whose beginning parts from others of its kind in its last words."""
    system = {"role": "system", "content": f"{RULES}\nYou are speaking to {who}"}
    return ChatPrompt([system, {"role": "user", "content": f"I am {who}, what is nobler?"}])


@pytest.fixture
def serve(tiny_dir: Path, tmp_path: Path) -> Open:
    """`async with serve(memory_bytes=0) as engine`: always on the same directory."""

    @asynccontextmanager
    async def open_engine(memory_bytes: int = 2**27) -> AsyncIterator[LocalEngine]:
        cache_dir = tmp_path / "cache" if memory_bytes else None
        engine = build_engine(
            Config(
                model=ModelConfig(model_dir=tiny_dir, dtype="fp32"),
                engine=EngineConfig(max_ctx_tokens=2048, parallel=1, prefill_chunk_tokens=512),
                cache=CacheConfig(memory_bytes=memory_bytes, cache_dir=cache_dir),
            )
        )
        async with engine:
            await engine.load()
            yield engine
            await engine.flush()

    return open_engine


async def ask(engine: LocalEngine, who: str) -> list[Delta]:
    request = Request(chat(who), Sampling(temperature=0.0), max_tokens=8, ignore_eos=True)
    return [delta async for delta in await engine.open(request)]


def num_cached(answer: list[Delta]) -> int:
    assert answer[-1].finish is not None
    return answer[-1].finish.usage.cached_tokens


def said(answer: list[Delta]) -> list[int]:
    return [token for delta in answer for token in delta.token_ids]


def num_shared(model_dir: Path) -> int:
    """Tokens that all of these prompts begin with."""
    beginning = f"<|im_start|>system\n{RULES}\nYou are speaking to"
    return len(Tokenizer.load(model_dir).encode(beginning))


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_prompt_that_diverges_where_two_did_goes_on_from_there(
    serve: Open, tiny_dir: Path, restarts: bool
):
    async with serve(memory_bytes=0) as cold:
        expected = said(await ask(cold, "Ophelia"))
    async with serve() as engine:
        for who in ("Hamlet", "Yorick"):
            await ask(engine, who)
        if not restarts:
            third = await ask(engine, "Ophelia")
    if restarts:
        async with serve() as engine:
            third = await ask(engine, "Ophelia")
    assert num_shared(tiny_dir) - num_cached(third) < CHUNK_TOKENS
    assert said(third) == expected
