"""A running request can be cancelled by its id, with the key that it came with."""

from __future__ import annotations

import asyncio
import json

import pytest

from luceasync.server_config import ServerConfig
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine

BODY = {"messages": [{"role": "user", "content": "hi"}]}
ID = {"x-request-id": "mine-1"}


def endless() -> ScriptedEngine:
    return ScriptedEngine([text_delta(0, "a", (1,)), asyncio.Event()])


async def begun(engine: ScriptedEngine) -> None:
    await asyncio.wait_for(engine.opened.wait(), 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_ends_the_answer_and_frees_its_lane(in_memory, stream):
    engine = endless()
    async with in_memory(engine) as client:
        asking = asyncio.create_task(
            client.post("/v1/chat/completions", json=BODY | {"stream": stream}, headers=ID)
        )
        await begun(engine)
        told = await client.post("/cancel/mine-1")
        answer = await asyncio.wait_for(asking, 5)
    assert (told.status_code, told.json()) == (200, {"id": "mine-1", "cancelled": 1})
    assert engine.streams[0].closed.is_set()
    if stream:
        last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["code"] == "cancelled"
        assert "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cancelled")


async def test_another_key_cannot_cancel_it(in_memory):
    engine = endless()
    config = ServerConfig(api_keys=("one", "other"))
    async with in_memory(engine, config) as client:
        own, other = ({"authorization": f"Bearer {key}"} for key in ("one", "other"))
        asking = asyncio.create_task(
            client.post("/v1/chat/completions", json=BODY, headers=own | ID)
        )
        await begun(engine)
        assert (await client.post("/cancel/mine-1")).status_code == 401
        assert (await client.post("/cancel/mine-1", headers=other)).status_code == 404
        assert not asking.done()
        assert (await client.post("/cancel/mine-1", headers=own)).status_code == 200
        assert (await asyncio.wait_for(asking, 5)).status_code == 409


async def test_a_finished_request_cannot_be_cancelled(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        await client.post("/v1/chat/completions", json=BODY, headers=ID)
        told = await client.post("/cancel/mine-1")
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_running")
        assert (await client.get("/cancel/mine-1")).status_code == 405
