"""OpenAI's own client understands every answer and every error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from luceasync.errors import ContextLengthError, QueueFull, Unavailable
from luceasync.request import TokenLogprob
from luceasync.server_config import ServerConfig
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, answer

HI = [{"role": "user", "content": "Hi"}]
TWO = [*answer("a", index=0), *answer("b", index=1)]


@pytest.fixture
def connect(on_port):
    @asynccontextmanager
    async def open_client(
        engine: ScriptedEngine, api_key: str = "one"
    ) -> AsyncIterator[openai.AsyncOpenAI]:
        async with on_port(engine, ServerConfig(api_keys=("one",))) as http:
            base_url = f"{http.base_url}/v1"
            async with openai.AsyncOpenAI(
                base_url=base_url, api_key=api_key, max_retries=0
            ) as client:
                yield client

    return open_client


async def test_a_plain_answer(connect):
    engine = ScriptedEngine()
    async with connect(engine) as client:
        completion = await client.chat.completions.create(
            model="tiny", messages=HI, stop=["END"], seed=7, max_completion_tokens=5
        )
    assert completion.choices[0].message.content == "Hello!"
    assert completion.usage.prompt_tokens_details.cached_tokens == 4
    assert completion.luceasync["restore"] is False
    request = engine.requests[0]
    assert (request.stop, request.sampling.seed, request.max_tokens) == (("END",), 7, 5)


async def test_a_streamed_answer_with_usage(connect):
    async with connect(ScriptedEngine()) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert (text, chunks[-1].usage.total_tokens) == ("Hello!", 13)
    assert chunks[-1].luceasync["tier"] is None


async def test_our_own_fields_go_in_its_extra_body(connect):
    engine = ScriptedEngine()
    async with connect(engine) as client:
        await client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=0, extra_body={"keep_prefix": True}
        )
    request = engine.requests[0]
    assert (request.keep_prefix, request.max_tokens, request.tenant) == (True, 0, "one")


async def test_two_choices(connect):
    async with connect(ScriptedEngine(TWO)) as client:
        completion = await client.chat.completions.create(model="tiny", messages=HI, n=2)
    assert [choice.message.content for choice in completion.choices] == ["a", "b"]


async def test_logprobs(connect):
    logprob = TokenLogprob("a", b"a", -0.5, (TokenLogprob("b", b"b", -1.5),))
    script = [text_delta(0, "a", (1,), (logprob,)), *answer()]
    async with connect(ScriptedEngine(script)) as client:
        completion = await client.chat.completions.create(
            model="tiny", messages=HI, logprobs=True, top_logprobs=1
        )
    entry = completion.choices[0].logprobs.content[0]
    assert (entry.logprob, entry.top_logprobs[0].token) == (-0.5, "b")


async def test_the_model_list(connect):
    async with connect(ScriptedEngine()) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "luceasync"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ContextLengthError(10, 20), openai.BadRequestError),
        (QueueFull(64, 1), openai.RateLimitError),
        (Unavailable("gone"), openai.InternalServerError),
        (ZeroDivisionError(), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_openais_classes(connect, error, expected, stream):
    async with connect(ScriptedEngine(opening=error)) as client:
        with pytest.raises(expected):
            await client.chat.completions.create(model="tiny", messages=HI, stream=stream)


async def test_an_error_within_a_stream_is_raised(connect):
    script = [text_delta(0, "a", (1,)), Unavailable("gone")]
    async with connect(ScriptedEngine(script)) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            _ = [chunk async for chunk in stream]


async def test_a_wrong_key_and_a_wrong_model(connect):
    async with connect(ScriptedEngine(), api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with connect(ScriptedEngine()) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4o", messages=HI)
