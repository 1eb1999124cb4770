"""A prompt that is only to be kept: over HTTP, with a directory, over a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open

from luceasync.config import CacheConfig, Config, EngineConfig, ModelConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig

SYSTEM = {"role": "system", "content": "to be or not to be, that is the question " * 12}
QUESTION = {"role": "user", "content": "whether it is nobler in the mind to suffer the slings?"}
KEEP = {"max_tokens": 0, "keep_prefix": True}

Post = Callable[..., Any]
Open = Callable[[], AbstractAsyncContextManager[tuple[LocalEngine, Post]]]


@pytest.fixture
def serve(tiny_dir: Path, tmp_path: Path) -> Open:
    """`async with serve() as (engine, post)`: always on the same cache directory."""
    config = Config(
        model=ModelConfig(model_dir=tiny_dir, dtype="fp32"),
        engine=EngineConfig(max_ctx_tokens=512, parallel=2),
        cache=CacheConfig(memory_bytes=2**26, cache_dir=tmp_path / "cache", min_tokens=64),
    )

    @asynccontextmanager
    async def open_client() -> AsyncIterator[tuple[LocalEngine, Post]]:
        async with build_engine(config) as engine:
            await engine.load()
            transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:

                async def post(*messages: dict[str, str], **fields: Any) -> dict[str, Any]:
                    body = {"messages": messages, "temperature": 0, "ignore_eos": True, **fields}
                    response = await client.post("/v1/chat/completions", json=body)
                    assert response.status_code == 200, response.text
                    return response.json()

                yield engine, post

    return open_client


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.any_family
@pytest.mark.slow
async def test_nothing_is_generated(serve):
    async with serve() as (engine, post):
        answer = await post(QUESTION, **KEEP)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    assert engine.status().decoded_tokens_total == 0


@pytest.mark.any_family
@pytest.mark.slow
async def test_a_kept_prompt_is_an_exact_hit_after_a_restart(serve):
    async with serve() as (_, post):
        cold = await post(SYSTEM, QUESTION, max_tokens=12)
    async with serve() as (_, post):
        await post(SYSTEM, QUESTION, **KEEP)
    async with serve() as (engine, post):
        answer = await post(SYSTEM, QUESTION, max_tokens=12)
    assert answer["luceasync"]["tier"] == "disk"
    assert cached(answer) == answer["usage"]["prompt_tokens"]
    assert engine.status().prefilled_tokens_total == 0
    assert answer["choices"][0]["message"] == cold["choices"][0]["message"]


async def test_the_end_of_a_kept_prompt_is_on_disk(serve, tmp_path, family):
    async with serve() as (_, post):
        kept = await post(SYSTEM, QUESTION, **KEEP)
    ends = {}
    for path in tmp_path.glob("cache/*/*.end"):
        with safe_open(path, "pt") as node:
            ends[int(node.metadata()["end"])] = set(node.keys())
    names = ends[kept["usage"]["prompt_tokens"]]
    assert "snap_prefill_logits" in names
    assert any("_delta." in name for name in names) == (family == "qwen3_5")


@pytest.mark.any_family
@pytest.mark.slow
async def test_a_prompt_is_kept_for_itself_where_an_answer_follows_too(serve):
    async with serve() as (_, post):
        await post(SYSTEM, QUESTION, max_tokens=8, keep_prefix=True)
    async with serve() as (engine, post):
        await post(SYSTEM, QUESTION, **KEEP)
    assert engine.status().prefilled_tokens_total == 0


@pytest.mark.slow
async def test_a_kept_beginning_serves_every_chat_that_goes_on_from_it(serve):
    async with serve() as (_, post):
        kept = await post(SYSTEM, **KEEP)
    async with serve() as (engine, post):
        answer = await post(SYSTEM, QUESTION, max_tokens=4)
    num_tokens = kept["usage"]["prompt_tokens"]
    assert cached(answer) == num_tokens > 0
    assert engine.status().prefilled_tokens_total == answer["usage"]["prompt_tokens"] - num_tokens


@pytest.mark.any_family
@pytest.mark.slow
async def test_examples_can_be_kept_too(serve):
    example = [QUESTION, {"role": "assistant", "content": "That is the question."}]
    async with serve() as (_, post):
        kept = await post(SYSTEM, *example, **KEEP)
    async with serve() as (_, post):
        answer = await post(SYSTEM, *example, {"role": "user", "content": "is it?"}, max_tokens=4)
    assert cached(answer) == kept["usage"]["prompt_tokens"]


@pytest.mark.slow
async def test_what_a_chat_has_left_without_logits_is_kept_with_them(serve, tmp_path):
    async with serve() as (_, post):
        await post(SYSTEM, QUESTION, max_tokens=2)
        await post(SYSTEM, **KEEP)
    async with serve() as (engine, post):
        again = await post(SYSTEM, **KEEP)
    assert cached(again) == again["usage"]["prompt_tokens"]
    assert engine.status().prefilled_tokens_total == 0
