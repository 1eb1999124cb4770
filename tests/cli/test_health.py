"""The health command asks the server that the same settings describe."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from luceasync.cli.health import run_health
from luceasync.config import ServerConfig
from luceasync.server.app import create_app
from luceasync.server.http.listener import listen, run_hypercorn, tls_context
from tests.server.scripted import ScriptedEngine
from tests.server.secure import SECURE


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(port=0),
        ServerConfig(host="0.0.0.0", port=0, api_keys=("sesame",), allow_hosts=("chat.lan",)),
        replace(SECURE, port=0),
    ],
    ids=["plain", "behind a key and a name", "TLS"],
)
async def test_a_server_is_healthy_once_it_is_ready(config, capsys):
    engine = ScriptedEngine()
    engine.loading = True
    listener, closed = listen(config), asyncio.Event()
    config = replace(config, port=listener.getsockname()[1])
    async with asyncio.TaskGroup() as tasks:
        serving = run_hypercorn(create_app(engine, config), listener, closed, tls_context(config))
        tasks.create_task(serving)
        loading = await asyncio.to_thread(run_health, config)
        engine.loading = False
        ready = await asyncio.to_thread(run_health, config)
        closed.set()
    assert (loading, ready) == (False, True)
    assert not await asyncio.to_thread(run_health, config)
    assert "does not answer" in capsys.readouterr().out
