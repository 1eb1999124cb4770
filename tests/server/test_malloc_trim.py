"""Memory is trimmed after many TLS connections, and when its size has changed much."""

from __future__ import annotations

import asyncio

from luceasync.server import malloc_trim
from luceasync.server.http import connections
from luceasync.server.malloc_trim import CHANGED_BYTES, ResidentChange
from tests.server.scripted import ScriptedEngine
from tests.server.secure import SECURE, connect


async def test_memory_is_trimmed_after_many_tls_connections(on_port, monkeypatch):
    loop, given_back = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(malloc_trim, "TRIM_DELAY_S", 0.0)
    monkeypatch.setattr(connections, "NUM_CLOSED_PER_TRIM", 3)
    monkeypatch.setattr(malloc_trim, "trim_heap", lambda: loop.call_soon_threadsafe(given_back.set))
    async with on_port(ScriptedEngine(), SECURE) as client:
        for _ in range(3):
            assert not given_back.is_set()
            _, writer = await connect(client.base_url.host, client.base_url.port)
            writer.transport.abort()
        async with asyncio.timeout(20):
            await given_back.wait()


def test_a_change_is_large_relative_to_the_last_trim():
    change = ResidentChange()
    assert change.is_large(10 * CHANGED_BYTES)
    change.trimmed(5 * CHANGED_BYTES)
    assert not change.is_large(6 * CHANGED_BYTES - 1)
    assert not change.is_large(4 * CHANGED_BYTES + 1)
    assert change.is_large(6 * CHANGED_BYTES)
    assert change.is_large(4 * CHANGED_BYTES)


async def test_a_server_whose_size_has_changed_trims(on_port, monkeypatch):
    loop, given_back, changed = asyncio.get_running_loop(), asyncio.Event(), [CHANGED_BYTES]
    monkeypatch.setattr(malloc_trim, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(malloc_trim, "resident_bytes", lambda: changed.pop(0) if changed else 0)
    monkeypatch.setattr(malloc_trim, "trim_heap", lambda: loop.call_soon_threadsafe(given_back.set))
    async with on_port(ScriptedEngine()), asyncio.timeout(20):
        await given_back.wait()
