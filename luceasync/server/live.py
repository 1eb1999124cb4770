"""GET /status/events: a look at the engine now and then, for whoever watches.

Owns how often, and that watchers hold up no shutdown. Knows nothing of what is looked at.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from luceasync.errors import LuceasyncError, RequestError, Unavailable
from luceasync.request import Engine
from luceasync.server.body import client_gone
from luceasync.server.drain import Drain
from luceasync.server.engine_view import told_look, told_status
from luceasync.server.race import race
from luceasync.server.sse import EventStream, encode_event

INTERVAL_S = 0.5
MAX_WATCHERS = 16


class Live:
    """The route; each watcher gets the same look."""

    def __init__(self, engine: Engine, drain: Drain) -> None:
        self._engine = engine
        self._drain = drain
        self._num_watchers = 0

    @property
    def routes(self) -> list[Route]:
        return [Route("/status/events", self._Watch(self), methods=["GET"])]

    class _Watch:
        """An ASGI app: a stream has no end of its own."""

        def __init__(self, live: Live) -> None:
            self._live = live

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await self._live.watch(receive, send)

    async def watch(self, receive: Receive, send: Send) -> None:
        """Tell until the client leaves or the server ends. Raises RequestError where too many
        watch.
        """
        if self._num_watchers >= MAX_WATCHERS:
            words = f"{MAX_WATCHERS} watch already."
            raise RequestError(words, code="too_many_watchers", status=429)
        self._num_watchers += 1
        events = EventStream(send)
        try:
            await race(self._tell(events), client_gone(receive))
        except ClientDisconnect:
            return
        except Unavailable:
            await events.close()
        finally:
            self._num_watchers -= 1

    async def _tell(self, events: EventStream) -> NoReturn:
        while not self._drain.closing:
            await events.write(encode_event(await self._look(), "status"))
            await asyncio.sleep(INTERVAL_S)
        raise Unavailable("The server is shutting down.")

    async def _look(self) -> dict[str, object]:
        told = told_status(self._engine)
        try:
            return told | {"live": told_look(await self._engine.look())}
        except LuceasyncError:  # not loaded yet, or it has failed: the status says so
            return told | {"live": None}
