"""Whoever watches is told how things are, again and again, and holds up no shutdown."""

from __future__ import annotations

import asyncio
import json

from luceasync.config import ServerConfig
from luceasync.server import status_pages
from tests.server.scripted import ScriptedEngine


async def events(lines):
    async for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_a_watcher_sees_lanes_queue_and_nodes_again_and_again(on_port, monkeypatch):
    monkeypatch.setattr(status_pages, "EVENTS_INTERVAL_S", 0.01)
    async with (
        on_port(ScriptedEngine()) as client,
        client.stream("GET", "/status/events") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        told = [event async for event, _ in _first(events(response.aiter_lines()), 3)]
    first = told[0]
    assert first["model"] == "tiny" and len(told) == 3
    [lane] = first["live"]["lanes"]
    assert (lane["phase"], lane["prompt_tokens"], lane["tau"]) == ("decoding", 10, 3.5)
    assert first["live"]["waiting"][0]["prompt_tokens"] == 7
    assert first["live"]["nodes"][0]["num_bytes"] == {"memory": 4096}


async def _first(stream, count):
    async for event in stream:
        count -= 1
        yield event, count
        if not count:
            return


async def test_no_more_watch_than_may(on_port, monkeypatch):
    monkeypatch.setattr(status_pages, "MAX_WATCHERS", 1)
    async with (
        on_port(ScriptedEngine()) as client,
        client.stream("GET", "/status/events") as response,
    ):
        await anext(events(response.aiter_lines()))
        assert (await client.get("/status/events")).status_code == 429


async def test_a_key_is_asked_for(in_memory):
    async with in_memory(ScriptedEngine(), ServerConfig(api_keys=("one",))) as client:
        assert (await client.get("/status/events")).status_code == 401


async def test_a_watcher_is_let_go_when_the_server_ends():
    from luceasync.server.drain import Drain

    drain, sent = Drain(), []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)
        drain.begin()

    await asyncio.wait_for(
        status_pages.StatusEvents(ScriptedEngine(), drain).watch(receive, send), 5
    )
    assert sent[-1]["more_body"] is False
