"""Chat answers: their events, their failures, and what a client that leaves sets free."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from luceasync.config import ServerConfig
from luceasync.errors import Unavailable
from luceasync.request import Delta, TokenLogprob
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, answer, finish

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
STREAM = BODY | {"stream": True}
USAGE = {"stream_options": {"include_usage": True}}


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event; "[DONE]" stays a word."""
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return events_of(response)


async def test_a_stream_is_role_text_finish_done(in_memory):
    async with in_memory(ScriptedEngine(answer("Hel", "lo"))) as client:
        *chunks, done = await ask(client, STREAM)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {},
    ]  # fmt: skip
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert "usage" not in chunks[0]
    assert chunks[-1]["timings"]["prompt_ms"] == 100.0


async def test_usage_comes_last_without_choices_and_is_null_before(in_memory):
    async with in_memory(ScriptedEngine(answer("a", "b"))) as client:
        *chunks, last, _ = await ask(client, STREAM | USAGE)
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    assert "timings" in last


async def test_continuous_usage_counts_along(in_memory):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with in_memory(ScriptedEngine(answer("a", "b"))) as client:
        *chunks, _, _ = await ask(client, STREAM | {"stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2]


async def test_the_plain_answer_says_what_the_stream_says(in_memory):
    script = [*answer("b", index=1, reason="length"), *answer("a1", "a2", index=0)]
    async with in_memory(ScriptedEngine(script)) as client:
        plain = (await client.post(CHAT, json=BODY | {"n": 2})).json()
        *_, usage, _ = await ask(client, STREAM | USAGE | {"n": 2})
    choices = [(c["message"]["content"], c["finish_reason"]) for c in plain["choices"]]
    assert choices == [("a1a2", "stop"), ("b", "length")]
    assert [choice["index"] for choice in plain["choices"]] == [0, 1]
    assert plain["usage"] == usage["usage"]
    assert plain["usage"]["completion_tokens"] == 3
    assert plain["timings"] == usage["timings"]
    assert plain["luceasync"] == usage["luceasync"]
    assert plain["object"] == "chat.completion"


async def test_every_choice_begins_with_its_role_and_ends_once(in_memory):
    script = [
        text_delta(0, "a", (1,)),
        text_delta(1, "b", (2,)),
        *answer(index=1),
        *answer(index=0),
    ]
    async with in_memory(ScriptedEngine(script)) as client:
        *chunks, _ = await ask(client, STREAM | {"n": 2})
    told = [(chunk["choices"][0]["index"], chunk["choices"][0]) for chunk in chunks]
    assert [i for i, choice in told if "role" in choice["delta"]] == [0, 1]
    assert [i for i, choice in told if choice["finish_reason"]] == [1, 0]
    assert ["timings" in chunk for chunk in chunks] == [False] * 5 + [True]
    assert ["luceasync" in chunk for chunk in chunks] == [False] * 5 + [True]


async def test_text_and_finish_in_one_delta_become_two_chunks(in_memory):
    async with in_memory(ScriptedEngine([text_delta(0, "end", (1,), finish=finish())])) as client:
        *chunks, _ = await ask(client, STREAM)
    assert [chunk["choices"][0]["delta"] for chunk in chunks][1:] == [{"content": "end"}, {}]


async def test_a_prompt_kept_without_an_answer_ends_at_its_length(in_memory):
    script = [Delta(0, finish=finish("length", num_tokens=0))]
    body = BODY | {"max_tokens": 0, "keep_prefix": True}
    async with in_memory(ScriptedEngine(script)) as client:
        plain = (await client.post(CHAT, json=body)).json()
        role, end, _ = await ask(client, body | {"stream": True})
    [choice] = plain["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert plain["usage"]["completion_tokens"] == 0
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert end["choices"][0]["finish_reason"] == "length"


async def test_held_back_text_sends_no_event(in_memory):
    script = [text_delta(0, "", (1,)), *answer("x")]
    async with in_memory(ScriptedEngine(script)) as client:
        assert len(await ask(client, STREAM)) == 4


async def test_logprobs_have_openais_shape(in_memory):
    top = (TokenLogprob("a", b"a", -0.5), TokenLogprob("\ufffd", b"\xc3", float("-inf")))
    script = [text_delta(0, "a", (1,), (TokenLogprob("a", b"a", -0.5, top),)), *answer()]
    async with in_memory(ScriptedEngine(script)) as client:
        plain = (await client.post(CHAT, json=BODY | {"logprobs": True})).json()
    [entry] = plain["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -0.5, [97])
    assert entry["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3]}


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize(
    ("script", "status"),
    [
        ([Delta(0, finish=finish("error", error="out of memory"))], 500),
        ([Delta(0, finish=finish("cancelled"))], 503),
        ([Unavailable("the engine died")], 503),
        ([ZeroDivisionError()], 500),
    ],
)
async def test_a_failure_before_the_first_byte_has_its_status(in_memory, script, status, body):
    engine = ScriptedEngine(script)
    async with in_memory(engine) as client:
        response = await client.post(CHAT, json=body)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "server_error"
    assert engine.streams[0].closed.is_set()


@pytest.mark.parametrize(
    "failure",
    [
        Delta(0, finish=finish("error", error="out of memory")),
        Unavailable("out of memory"),
    ],
)
async def test_a_failure_after_it_is_an_error_event_without_done(in_memory, failure):
    engine = ScriptedEngine([text_delta(0, "a", (1,)), failure])
    async with in_memory(engine) as client:
        streamed = await ask(client, STREAM)
        plain = await client.post(CHAT, json=BODY)
    assert streamed[-1]["error"]["message"] == "out of memory"
    assert "[DONE]" not in streamed
    assert plain.status_code in (500, 503)


async def test_an_answer_that_lacks_a_finish_is_a_failure(in_memory):
    async with in_memory(ScriptedEngine([text_delta(0, "a", (1,))])) as client:
        assert (await client.post(CHAT, json=BODY)).status_code == 500
        assert "error" in (await ask(client, STREAM))[-1]


async def test_every_stream_is_closed_after_its_answer(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        await client.post(CHAT, json=BODY)
        await client.post(CHAT, json=STREAM)
    assert [stream.closed.is_set() for stream in engine.streams] == [True, True]


async def test_a_long_prefill_is_bridged_by_comments(on_port):
    gate = asyncio.Event()
    engine = ScriptedEngine([gate, *answer("late")])
    async with (
        on_port(engine, ServerConfig(keep_alive_s=0.01)) as client,
        client.stream("POST", CHAT, json=STREAM) as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        gate.set()
        rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"


async def test_a_failure_after_a_comment_is_an_error_event(on_port):
    gate = asyncio.Event()
    engine = ScriptedEngine([gate, Unavailable("the engine died")])
    async with (
        on_port(engine, ServerConfig(keep_alive_s=0.01)) as client,
        client.stream("POST", CHAT, json=STREAM) as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        gate.set()
        rest = [line async for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == "the engine died"


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("script", [[], [text_delta(0, "a", (1,))]], ids=["prefill", "decode"])
async def test_a_client_that_leaves_closes_its_stream(on_port, script, body):
    engine = ScriptedEngine([*script, asyncio.Event()])
    async with on_port(engine) as client, asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(client.post(CHAT, json=body))
        while not engine.streams:
            await engine.opened.wait()
            await asyncio.sleep(0)
        asking.cancel()
        await engine.streams[0].closed.wait()


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_a_client_that_leaves_the_queue_is_forgotten(on_port, body):
    engine = ScriptedEngine(opening=asyncio.Event())
    async with on_port(engine) as client, asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(client.post(CHAT, json=body))
        await engine.opened.wait()
        asking.cancel()
        await engine.open_cancelled.wait()
    assert engine.streams == []
