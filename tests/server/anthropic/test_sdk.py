"""Anthropic's own client understands every answer and every error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from luceasync.errors import Unavailable
from luceasync.server_config import ServerConfig
from tests.server.anthropic.test_messages import CALLING
from tests.server.scripted import ScriptedEngine

ASKED = {"model": "tiny", "max_tokens": 10, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    """Imported late: it takes seconds, also in processes that only collect these tests."""
    import anthropic

    return anthropic


@pytest.fixture
def connect(on_port, anthropic):
    @asynccontextmanager
    async def open_client(engine: ScriptedEngine, api_key: str = "one") -> AsyncIterator[Any]:
        async with (
            on_port(engine, ServerConfig(api_keys=("one",))) as http,
            anthropic.AsyncAnthropic(
                base_url=str(http.base_url), api_key=api_key, max_retries=0
            ) as client,
        ):
            yield client

    return open_client


async def test_a_plain_answer(connect):
    async with connect(ScriptedEngine()) as client:
        message = await client.messages.create(**ASKED)
    assert message.content[0].text == "Hello!"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (6, 4)


async def test_a_stream_is_folded_to_the_same_message(connect):
    async with connect(ScriptedEngine(CALLING)) as client:
        plain = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_message()
    assert streamed.model_dump()["content"] == plain.model_dump()["content"]
    assert streamed.content[2].input == {"a": 1}
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == 4


async def test_counting(connect):
    async with connect(ScriptedEngine()) as client:
        asked = {name: ASKED[name] for name in ("model", "messages")}
        assert (await client.messages.count_tokens(**asked)).input_tokens == 10


async def test_the_models(connect):
    async with connect(ScriptedEngine()) as client:
        models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]


async def test_errors_have_anthropics_classes(connect, anthropic):
    async with connect(ScriptedEngine(), api_key="two") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**ASKED)
    async with connect(ScriptedEngine()) as client:
        with pytest.raises(anthropic.NotFoundError, match="tiny"):
            await client.messages.create(**ASKED | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(**ASKED | {"max_tokens": 0})
    async with connect(ScriptedEngine([Unavailable("gone")])) as client:
        with pytest.raises(anthropic.APIStatusError, match="gone"):
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
