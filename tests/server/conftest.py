"""The app around a scripted engine, in memory or on a loopback port."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from luceasync.server.app import create_app
from luceasync.server.http.listener import listen, run_hypercorn, tls_context, url_of
from luceasync.server_config import ServerConfig
from tests.server.scripted import ScriptedEngine

Clients = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def in_memory() -> Clients:
    """A client that calls the app directly; a streamed answer arrives when it has ended."""

    @asynccontextmanager
    async def open_client(
        engine: ScriptedEngine, config: ServerConfig | None = None, **options: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(engine, config or ServerConfig(), **options)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client

    return open_client


@pytest.fixture
def on_port() -> Clients:
    """A client of the app on a real Hypercorn, over loopback."""

    @asynccontextmanager
    async def open_client(
        engine: ScriptedEngine, config: ServerConfig | None = None
    ) -> AsyncIterator[httpx.AsyncClient]:
        config = config or ServerConfig()
        app = create_app(engine, config)
        listener, closed, tls = listen(ServerConfig(port=0)), asyncio.Event(), tls_context(config)
        url = url_of(listener, tls)
        trusted = ssl.create_default_context(cafile=config.tls_cert)
        async with (
            asyncio.TaskGroup() as tasks,
            httpx.AsyncClient(base_url=url, verify=trusted) as client,
        ):
            tasks.create_task(run_hypercorn(app, listener, closed, tls))
            try:
                yield client
            finally:
                app.state.drain.expire()
                await client.aclose()
                closed.set()

    return open_client
