"""Freed memory goes back to the system after many connections of TLS."""

from __future__ import annotations

import asyncio

from luceasync.server import connections, giving_back
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
