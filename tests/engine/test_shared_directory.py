"""Servers that share a cache directory: each takes up at once what another has just written, and
one of them keeps the budget.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from luceasync.config import CacheConfig, Config, EngineConfig, ModelConfig, PlacementConfig
from luceasync.disk_cache import disk, object_store
from luceasync.disk_cache.keeper import LEASE
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.prefix_cache.lookup import MAX_TAIL_TOKENS
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig

DEADLINE_S = 60.0
MIN_TOKENS = 64  # that are worth a file, and a look for one
SYSTEM = {"role": "system", "content": "to be or not to be, that is the question " * 12}
QUESTION = {"role": "user", "content": "whether it is nobler in the mind to suffer the slings?"}
SAID = {"role": "assistant", "content": "it is nobler to suffer"}
NEXT = {"role": "user", "content": "and by opposing end them? " * 8}
# Random letters, whose tokens are seldom those that the text is encoded to.
LETTERS = {"regex": "[a-z]{60}", "max_tokens": 64, "temperature": 1, "seed": 5}
THIRD = {"role": "user", "content": "to die, to sleep; to sleep, perchance to dream?"}


class Server:
    """One of the servers, and what a client asks it."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        app = create_app(engine, ServerConfig())
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        )

    async def ask(self, *messages: dict[str, str], **fields: object) -> dict[str, Any]:
        """The answer, once every node of it is written."""
        body = {"messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": 12}
        body |= fields
        response = await self._client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        await self.engine.flush()
        return response.json()


def said(answer: dict[str, Any]) -> dict[str, str]:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def num_run(answer: dict[str, Any]) -> int:
    """How many tokens of the prompt were run."""
    usage = answer["usage"]
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


@asynccontextmanager
async def servers_of(tiny_dir: Path, cache_dir: Path, *splits: tuple[float, ...] | None, **cache):
    settings = {"memory_bytes": 2**26, "min_tokens": MIN_TOKENS, "is_shared": True, **cache}
    async with AsyncExitStack() as stack:
        servers = []
        for split in splits:
            placement = PlacementConfig()
            if split is not None:
                placement = PlacementConfig(
                    devices=tuple(f"cpu:{i}" for i in range(len(split))), layer_split=split
                )
            config = Config(
                model=ModelConfig(model_dir=tiny_dir, dtype="fp32"),
                placement=placement,
                engine=EngineConfig(max_ctx_tokens=1024, parallel=2),
                cache=CacheConfig(cache_dir=cache_dir, **settings),
            )
            engine = await stack.enter_async_context(build_engine(config))
            await engine.load()
            servers.append(Server(engine))
        yield servers


@pytest.mark.slow
async def test_a_turn_on_one_server_goes_on_on_another_of_another_split(
    tiny_dir: Path, tmp_path: Path
) -> None:
    turns = ((SYSTEM, QUESTION), (SAID, NEXT), (SAID, THIRD))
    one, two, three = (sum(turns[:num], ()) for num in (1, 2, 3))
    async with servers_of(tiny_dir, tmp_path / "one", None, is_shared=False) as (alone,):
        expected = [await alone.ask(*turn) for turn in (one, two, three)]
    async with servers_of(tiny_dir, tmp_path / "shared", None, (0.5, 0.5)) as (a, b):
        first = await a.ask(*one)
        again = await b.ask(*one)
        second = await a.ask(*two)
        third = await b.ask(*three)
    assert [said(first), said(second), said(third)] == [*map(said, expected)]
    assert said(again) == said(first)
    assert again["luceasync"]["tier"] == third["luceasync"]["tier"] == "disk"
    assert num_run(again) < MIN_TOKENS
    assert num_run(third) < num_run(expected[2]) + MIN_TOKENS


@pytest.mark.slow
@pytest.mark.any_family
async def test_what_one_server_has_said_keeps_its_tokens_on_another(
    tiny_dir: Path, tmp_path: Path
) -> None:
    async with servers_of(tiny_dir, tmp_path, None, None) as (a, b):
        messages, num_known = [SYSTEM, QUESTION], 0
        for server in (a, b, a):
            answer = await server.ask(*messages, **LETTERS)
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= num_known - MAX_TAIL_TOKENS
            num_known = usage["prompt_tokens"] + usage["completion_tokens"]
            messages += [said(answer), THIRD]


@pytest.mark.any_family
@pytest.mark.slow
async def test_what_one_server_puts_into_a_store_another_takes_up(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MIN_UPLOAD_TOKENS", 1)
    monkeypatch.setattr(object_store, "UPLOAD_SHARE", 1.0)
    (tmp_path / "store").mkdir()
    key_file = tmp_path / "secret"
    key_file.write_text("a secret of all these servers")
    store = {
        "is_shared": False,
        "store_url": f"file://{tmp_path}/store",
        "store_key_file": key_file,
    }
    two = (SYSTEM, QUESTION, SAID, NEXT)
    async with servers_of(tiny_dir, tmp_path / "a", None, **store) as (a,):
        first = await a.ask(SYSTEM, QUESTION)
        second = await a.ask(*two)
        num_files = len([*tmp_path.glob("a/*/*.safetensors"), *tmp_path.glob("a/*/*.end")])
        async with asyncio.timeout(DEADLINE_S):
            while len(list(tmp_path.glob("store/*/*/*"))) < num_files:
                await asyncio.sleep(0.01)
    async with servers_of(tiny_dir, tmp_path / "b", (0.5, 0.5), **store) as (b,):
        again = await b.ask(*two)
        assert (said(again), again["luceasync"]["tier"]) == (said(second), "disk")
        assert num_run(again) <= num_run(await b.ask(*two)) + MIN_TOKENS
    key_file.write_text("the secret of somebody else")
    async with servers_of(tiny_dir, tmp_path / "c", None, **store) as (c,):
        unknown = await c.ask(SYSTEM, QUESTION)
    assert said(unknown) == said(first)
    assert num_run(unknown) == unknown["usage"]["prompt_tokens"]


async def test_the_budget_is_given_up_at_the_end(tiny_dir: Path, tmp_path: Path) -> None:
    async with servers_of(tiny_dir, tmp_path, None):
        async with asyncio.timeout(DEADLINE_S):
            while not (tmp_path / LEASE).exists():
                await asyncio.sleep(0.01)
    assert not (tmp_path / LEASE).exists()
