"""Bodies are bounded in memory all together, and small ones always get through."""

from __future__ import annotations

import asyncio

import pytest

from luceasync.errors import Unavailable
from luceasync.server import malloc_trim
from luceasync.server.http.body import LARGE_BYTES, SMALL_BYTES, BodyMemory
from tests.server.scripted import ScriptedEngine

ROOM = 1 << 20


def test_bodies_share_one_limit():
    bodies = BodyMemory(ROOM)
    with bodies.reserve() as one, bodies.reserve() as other:
        one.grow(SMALL_BYTES + ROOM - 10)
        other.grow(SMALL_BYTES + 10)
        with pytest.raises(Unavailable, match="bodies of other requests"):
            other.grow(1)
    with bodies.reserve() as next_one:
        next_one.grow(SMALL_BYTES + ROOM)


def test_a_body_alone_always_fits():
    with BodyMemory(ROOM).reserve() as held:
        held.grow(SMALL_BYTES + 2 * ROOM)
        held.grow(ROOM)


def test_small_bodies_always_fit():
    bodies = BodyMemory(ROOM)
    with bodies.reserve() as large:
        large.grow(SMALL_BYTES + ROOM)
        for _ in range(100):
            bodies.reserve().grow(SMALL_BYTES)


def test_released_memory_is_returned_once():
    bodies = BodyMemory(ROOM)
    with bodies.reserve() as held:
        held.grow(SMALL_BYTES + ROOM)
        held.release()
    with bodies.reserve() as one, bodies.reserve() as other:
        one.grow(SMALL_BYTES + ROOM)
        with pytest.raises(Unavailable):
            other.grow(SMALL_BYTES + 1)


@pytest.mark.slow
async def test_a_large_body_is_followed_by_a_trim(monkeypatch):
    given_back = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        malloc_trim,
        "trim_heap",
        lambda: loop.call_soon_threadsafe(given_back.set),
    )
    with BodyMemory().reserve() as held:
        held.grow(LARGE_BYTES)
    async with asyncio.timeout(20):
        await given_back.wait()


async def test_a_body_that_does_not_fit_is_refused_and_may_be_sent_again(in_memory, monkeypatch):
    """While the first waits for the engine, the second does not fit."""
    monkeypatch.setattr(BodyMemory.__init__, "__defaults__", (ROOM,))
    opening = asyncio.Event()
    engine = ScriptedEngine(opening=opening)
    text = "x" * (SMALL_BYTES + ROOM // 2)
    body = {"messages": [{"role": "user", "content": text}]}
    async with in_memory(engine) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await engine.opened.wait()
        refused = await client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        opening.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_many_large_bodies_are_followed_by_one_trim(monkeypatch):
    given: list[int] = []
    monkeypatch.setattr(malloc_trim, "TRIM_DELAY_S", 0.01)
    monkeypatch.setattr(malloc_trim, "trim_heap", lambda: given.append(1))
    bodies = BodyMemory()
    for _ in range(60):
        with bodies.reserve() as held:
            held.grow(LARGE_BYTES)
    async with asyncio.timeout(10):
        while not given:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.03)
    assert given == [1]
