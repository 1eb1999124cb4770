"""Freed memory goes back to the system after many connections of TLS, and where it has grown."""

from __future__ import annotations

import asyncio

from luceasync.server import connections, giving_back
from luceasync.server.giving_back import GROWN_BYTES, Growth
from tests.server.scripted import ScriptedEngine
from tests.server.secure import SECURE, H2Client


async def test_memory_is_given_back_after_many_connections_of_tls(on_port, monkeypatch):
    loop, given_back = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(giving_back, "GIVE_BACK_S", 0.0)
    monkeypatch.setattr(connections, "NUM_ENDED", 3)
    monkeypatch.setattr(
        giving_back, "give_back_freed_memory", lambda: loop.call_soon_threadsafe(given_back.set)
    )
    async with on_port(ScriptedEngine(), SECURE) as client:
        for _ in range(3):
            assert not given_back.is_set()
            h2 = await H2Client.connect(client.base_url.host, client.base_url.port)
            h2.close()
        async with asyncio.timeout(20):
            await given_back.wait()


def test_memory_has_grown_since_it_was_least_or_was_given_back():
    growth = Growth()
    assert not growth.has_grown(10 * GROWN_BYTES)
    assert not growth.has_grown(3 * GROWN_BYTES)
    assert not growth.has_grown(4 * GROWN_BYTES - 1)
    assert growth.has_grown(4 * GROWN_BYTES)
    growth.gave_back(4 * GROWN_BYTES - 1)  # nearly all of it is in use
    assert not growth.has_grown(4 * GROWN_BYTES)
    assert growth.has_grown(5 * GROWN_BYTES)


async def test_a_server_that_has_grown_gives_memory_back(on_port, monkeypatch):
    loop, given_back, grown = asyncio.get_running_loop(), asyncio.Event(), [0, GROWN_BYTES]
    monkeypatch.setattr(giving_back, "LOOK_S", 0.0)
    monkeypatch.setattr(giving_back, "resident_bytes", lambda: grown.pop(0) if grown else 0)
    monkeypatch.setattr(
        giving_back, "give_back_freed_memory", lambda: loop.call_soon_threadsafe(given_back.set)
    )
    async with on_port(ScriptedEngine()), asyncio.timeout(20):
        await given_back.wait()
