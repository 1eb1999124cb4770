"""A request leaves one line in the log; the id in its answer finds that line."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import httpx
import pytest

from luceasync.request import Speculation, Timings
from luceasync.server.app import create_app
from luceasync.server.http.responses import EventStream
from luceasync.server.request_log import LogRequests
from luceasync.server_config import ServerConfig
from tests.deltas import text_delta
from tests.server import secure
from tests.server.scripted import ScriptedEngine, answer, finish

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
PATHS = {
    CHAT: BODY,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": BODY | {"model": "tiny", "max_tokens": 5},
}
LOG = LogRequests.__module__


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    """The lines of the requests so far."""
    caplog.set_level(logging.INFO, LOG)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOG]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_has_the_figures_of_an_answer(in_memory, lines, stream):
    script = answer("Hel", "lo")[:-1]
    script += [text_delta(0, "!", (3,), finish=finish(speculation=Speculation(2, 30, 4)))]
    async with in_memory(ScriptedEngine(script)) as client:
        response = await client.post(CHAT, json=BODY | {"stream": stream})
    [line] = lines()
    assert line.startswith(f"POST {CHAT} 200 ")
    for words in ("prompt=10 cached=4 new=3 first=", " 20.0 tokens/s ", " tau=3.00 "):
        assert words in line
    assert line.endswith(f" id={response.headers['x-request-id']}")


async def test_a_line_without_a_decoded_token_has_no_pace(in_memory, lines):
    ended = replace(finish(num_tokens=1), timings=Timings(0.0, 0.1, 0.001, 10, 0))
    async with in_memory(ScriptedEngine([text_delta(0, "!", (3,), finish=ended)])) as client:
        await client.post(CHAT, json=BODY)
    assert "tokens/s" not in lines()[0]


async def test_a_refusal_leaves_a_line_and_an_id_too(in_memory, lines):
    async with in_memory(ScriptedEngine(), ServerConfig(api_keys=("sesame",))) as client:
        answers = [
            await client.get("/nowhere", headers={"x-api-key": "sesame"}),
            await client.post(CHAT, json=BODY),
            await client.post(CHAT, content=b"{", headers={"x-api-key": "sesame"}),
        ]
    told = [line.split()[:3] for line in lines()]
    assert told == [
        ["GET", "unmatched", "404"],
        ["POST", CHAT, "401"],
        ["POST", CHAT, "400"],
    ]
    assert all(answer.headers["x-request-id"] for answer in answers)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/status"])
async def test_what_programs_and_pages_poll_leaves_no_line(in_memory, lines, path):
    async with in_memory(ScriptedEngine()) as client:
        assert (await client.get(path)).status_code == 200
    assert lines() == []


async def test_an_unexpected_error_is_a_500_with_an_id_and_is_counted(in_memory, lines):
    async with in_memory(ScriptedEngine(opening=ZeroDivisionError("a secret"))) as client:
        response = await client.post(CHAT, json=BODY)
        metrics = (await client.get("/metrics")).text
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert lines()[0].endswith(f"id={response.headers['x-request-id']}")
    assert f'requests_total{{route="{CHAT}",status="500"}} 1.0' in metrics
    assert "secret" not in response.text + lines()[0]


@pytest.mark.parametrize("sent", ["abc-123", "a" * 128, "trace/1:2=3"])
async def test_a_sane_id_of_the_client_is_kept(in_memory, lines, sent):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.get("/v1/models", headers={"x-request-id": sent})
    assert response.headers["x-request-id"] == sent
    assert lines()[0].endswith(f" id={sent}")


@pytest.mark.parametrize("sent", ["", "a b", "a" * 129, b"\xff", 'x" new=9', b"a\tb"])
async def test_any_other_id_is_replaced(in_memory, lines, sent):
    async with in_memory(ScriptedEngine()) as client:
        made = [
            (await client.get("/v1/models", headers={"x-request-id": sent})).headers["x-request-id"]
            for _ in range(2)
        ]
    assert all(each.startswith("req-") for each in made)
    assert made[0] != made[1]


async def test_polled_pages_are_logged_at_debug_only(in_memory, lines, caplog):
    async with in_memory(ScriptedEngine()) as client:
        await client.get("/health")
        assert lines() == []
        caplog.set_level(logging.DEBUG, LOG)
        await client.get("/ready")
    assert [line[:14] for line in lines()] == ["GET /ready 200"]


async def test_a_client_that_leaves_is_logged(on_port, lines):
    gate = asyncio.Event()
    async with on_port(ScriptedEngine([text_delta(0, "x", (1,)), gate])) as client:
        async with client.stream("POST", CHAT, json=BODY | {"stream": True}) as response:
            await anext(response.aiter_raw())
        while not lines():
            await asyncio.sleep(0.01)
    assert " new=1 first=" in lines()[0]
    assert " the client left id=" in lines()[0]


@pytest.mark.parametrize("config", [ServerConfig(), secure.SECURE], ids=["http", "https"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_has_its_whole_answer_has_not_left(on_port, lines, config, path):
    """Each connection ends with its answer."""
    async with on_port(ScriptedEngine(), config) as client:
        headers, body = {"connection": "close"}, PATHS[path] | {"stream": True}
        async with client.stream("POST", path, json=body, headers=headers) as response:
            assert b"Hel" in await response.aread()
    assert [line.partition(" 200 ")[0] for line in lines()] == [f"POST {path}"]
    assert "the client left" not in lines()[0]


async def test_a_shutdown_within_the_last_send_adds_nothing(lines, monkeypatch):
    async def close_and_expire(stream: EventStream, events: bytes = b"") -> None:
        await close(stream, events)
        app.state.drain.expire()
        await asyncio.Event().wait()

    close = EventStream.close
    monkeypatch.setattr(EventStream, "close", close_and_expire)
    app = create_app(ScriptedEngine(), ServerConfig())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        told = await client.post(CHAT, json=BODY | {"stream": True})
    assert told.text.endswith("data: [DONE]\n\n")
    assert "broken off" not in lines()[0]


async def test_an_answer_that_broke_off_is_logged(in_memory, lines):
    script = [text_delta(0, "x", (1,)), ZeroDivisionError()]
    async with in_memory(ScriptedEngine(script)) as client:
        await client.post(CHAT, json=BODY | {"stream": True})
    assert " 200 " in lines()[0]
    assert " broken off (500) id=" in lines()[0]
