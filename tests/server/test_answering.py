"""Failures have their status, silence is filled, and a client that leaves frees its lane."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest

from luceasync.errors import Unavailable
from luceasync.request import Delta
from luceasync.server.app import create_app
from luceasync.server.http.body import SMALL_BYTES
from luceasync.server.openai import chat_answer
from luceasync.server_config import ServerConfig
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, answer, finish

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
STREAM = BODY | {"stream": True}


async def last_event(client: httpx.AsyncClient) -> str:
    """The data of the last event of a streamed answer."""
    response = await client.post(CHAT, json=STREAM)
    return response.text.strip().rsplit("\n\n", 1)[-1].removeprefix("data: ")


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
async def test_a_failure_after_the_first_byte_is_the_last_event(in_memory, failure):
    engine = ScriptedEngine([text_delta(0, "a", (1,)), failure])
    async with in_memory(engine) as client:
        last = await last_event(client)
        plain = await client.post(CHAT, json=BODY)
    assert json.loads(last)["error"]["message"] == "out of memory"
    assert plain.status_code in (500, 503)


async def test_an_answer_that_lacks_a_finish_is_a_failure(in_memory):
    async with in_memory(ScriptedEngine([text_delta(0, "a", (1,))])) as client:
        assert (await client.post(CHAT, json=BODY)).status_code == 500
        assert "error" in json.loads(await last_event(client))


async def test_every_stream_is_closed_after_its_answer(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        await client.post(CHAT, json=BODY)
        await client.post(CHAT, json=STREAM)
    assert [stream.closed.is_set() for stream in engine.streams] == [True, True]


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_the_engine_is_told_of_an_answer_after_its_last_bytes(body):
    """Lanes are saved then, which would hold up these bytes."""
    engine, told_after = ScriptedEngine(), []
    app = create_app(engine, ServerConfig())

    async def noting(scope, receive, send):
        async def noted(message):
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                told_after.append(engine.num_sent)
            await send(message)

        await app(scope, receive, noted)

    transport = httpx.ASGITransport(app=noting)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.post(CHAT, json=body)
    assert told_after == [0]
    assert engine.num_sent == 1


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


async def test_large_bodies_are_parsed_in_threads_one_at_a_time(in_memory, monkeypatch):
    real, threads, at_once = chat_answer.parse_chat, [], []
    reading = threading.Semaphore(1)

    def parse(*of_request):
        at_once.append(reading.acquire(blocking=False))
        threads.append(threading.get_ident())
        try:
            return real(*of_request)
        finally:
            reading.release()

    monkeypatch.setattr(chat_answer, "parse_chat", parse)
    large = {"messages": [{"role": "user", "content": "x" * (SMALL_BYTES + 1)}]}
    async with in_memory(ScriptedEngine()) as client:
        await client.post(CHAT, json=BODY)
        await asyncio.gather(*(client.post(CHAT, json=large) for _ in range(8)))
    loop = threading.get_ident()
    assert [thread == loop for thread in threads] == [True, *[False] * 8]
    assert all(at_once)
