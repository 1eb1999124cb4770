"""Watchers get the status as events; nodes are listed and dropped with an admin key."""

from __future__ import annotations

import asyncio
import json

import pytest

from luceasync.request import Delta, Restore
from luceasync.server import status_pages
from luceasync.server.answer_stats import RecentAnswers
from luceasync.server_config import ServerConfig
from luceasync.status import ExpertsStatus, conversation_label
from tests.server.scripted import ScriptedEngine, answer, finish


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


async def test_the_status_says_where_experts_were(on_port):
    engine = ScriptedEngine()
    async with on_port(engine) as client:
        assert (await client.get("/status")).json()["experts"] is None
        engine.experts = ExpertsStatus(90, 8, 2, 4096)
        found = (await client.get("/status")).json()["experts"]
    places = {"hits_total": 90, "misses_total": 8, "read_through_total": 2}
    assert found == {"distinct_total": 100, **places, "num_bytes_total": 4096}


@pytest.mark.parametrize(
    "path", ["/get_model_info", "/model_info", "/get_server_info", "/server_info"]
)
async def test_a_router_finds_the_model_s_name_and_room(on_port, path: str):
    async with on_port(ScriptedEngine()) as client:
        told = (await client.get(path)).json()
    assert told["model_path"] == told["served_model_name"] == "tiny"
    assert told["is_generation"] and told["max_running_requests"] > 0


async def test_a_router_is_told_how_many_requests_run_and_wait(on_port):
    engine = ScriptedEngine()
    async with on_port(engine) as client:
        [newer] = (await client.get("/v1/loads?include=core,queues")).json()["loads"]
        [older] = (await client.get("/get_load")).json()
    status = engine.status()
    assert newer == older
    assert newer["num_running_reqs"] == status.num_running
    assert newer["num_waiting_reqs"] == status.num_queued
    assert newer["num_reqs"] == status.num_running + status.num_queued
    assert newer["token_usage"] == 0  # routers avoid servers whose memory is nearly full


async def _first(stream, count):
    async for event in stream:
        count -= 1
        yield event, count
        if not count:
            return


async def test_a_watcher_sees_why_the_last_answers_took_their_time(on_port):
    engine = ScriptedEngine(
        [*answer("a")[:1], Delta(0, finish=finish(restore=Restore(miss_reason="no_memory")))]
    )
    body = {"messages": [{"role": "user", "content": "x"}], "prompt_cache_key": "mine"}
    async with on_port(engine) as client:
        await client.post("/v1/chat/completions", json=body)
        async with client.stream("GET", "/status/events") as response:
            [event] = [event async for event, _ in _first(events(response.aiter_lines()), 1)]
    [record] = event["live"]["recent"]
    assert record["conversation"] == conversation_label("mine")
    assert (record["prompt_tokens"], record["cached_tokens"]) == (10, 4)
    assert record["luceasync"]["miss_reason"] == "no_memory"
    assert record["timings"]["queued_ms"] == 1.0 and record["ended_s"] >= 0
    assert "mine" not in str(event)


async def test_watchers_are_bounded(on_port, monkeypatch):
    monkeypatch.setattr(status_pages, "MAX_WATCHERS", 1)
    async with (
        on_port(ScriptedEngine()) as client,
        client.stream("GET", "/status/events") as response,
    ):
        await anext(events(response.aiter_lines()))
        assert (await client.get("/status/events")).status_code == 429


async def test_watching_needs_an_api_key(in_memory):
    async with in_memory(ScriptedEngine(), ServerConfig(api_keys=("one",))) as client:
        assert (await client.get("/status/events")).status_code == 401


async def test_a_shutdown_ends_the_stream_of_a_watcher():
    from luceasync.server.drain import Drain

    drain, sent = Drain(), []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)
        drain.begin()

    await asyncio.wait_for(
        status_pages.StatusEvents(ScriptedEngine(), drain, RecentAnswers()).watch(receive, send), 5
    )
    assert sent[-1]["more_body"] is False


ADMIN = {"authorization": "Bearer root"}
CONFIG = ServerConfig(api_keys=("one",), admin_keys=("root",))


async def test_nodes_are_listed_and_dropped(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine, CONFIG) as client:
        listed = (await client.get("/admin/cache", headers=ADMIN)).json()
        assert listed["num_nodes"] == 2 and listed["nodes"][0]["key"] == "ab" * 32
        one = await client.delete("/admin/cache/" + "ab" * 32, headers=ADMIN)
        assert one.json() == {"dropped": 1} and engine.kept == ["cd" * 32]
        again = await client.delete("/admin/cache/" + "ab" * 32, headers=ADMIN)
        assert again.status_code == 404
        odd = await client.delete("/admin/cache/../x", headers=ADMIN)
        assert odd.status_code == 404
        assert (await client.delete("/admin/cache/xyz", headers=ADMIN)).status_code == 400
        assert (await client.delete("/admin/cache", headers=ADMIN)).json() == {"dropped": 1}
    assert engine.kept == []


@pytest.mark.parametrize("config", [ServerConfig(), CONFIG])
async def test_other_keys_are_refused(in_memory, config):
    engine = ScriptedEngine()
    async with in_memory(engine, config) as client:
        for method in ("GET", "DELETE"):
            headers = {"authorization": "Bearer one"}
            refused = await client.request(method, "/admin/cache", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_admin_key")
    assert len(engine.kept) == 2
