"""Answers one HTTP request of any API, from its body to the last byte.

Owns the order of the steps and the conditions that end a request early. Independent of the content
of bodies and events.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from luceasync.request import Delta, Engine, Request
from luceasync.server.answers import CallAnswers, Observer
from luceasync.server.cancellation import Cancellation, RunningRequests
from luceasync.server.drain import Drain, race
from luceasync.server.failures import describe
from luceasync.server.family import Call, Endpoint
from luceasync.server.fields import refuse_compressed
from luceasync.server.http.auth import Caller, accepted_key, client_named_by_router
from luceasync.server.http.body import (
    SMALL_BYTES,
    BodyMemory,
    BodyReservation,
    read_body,
    wait_for_disconnect,
)
from luceasync.server.http.responses import EventStream, Framing, json_response
from luceasync.server.metrics import Metrics
from luceasync.server.request_log import RequestNote, note_of
from luceasync.server_config import ServerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The objects shared by all answers of one app."""

    engine: Engine
    config: ServerConfig
    drain: Drain
    metrics: Metrics
    trust_cache_salt: bool
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    running: RunningRequests = field(default_factory=RunningRequests)


class Answering:
    """The ASGI app of one endpoint. When the client disconnects or the server shuts down, the
    streams of its request are closed at once.
    """

    def __init__(self, endpoint: Endpoint, framing: Framing, context: ServerContext) -> None:
        self._endpoint = endpoint
        self._framing = framing
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._context.drain.admit():
            try:
                await self._serve(scope, receive, send)
            except ClientDisconnect:
                note_of(scope).remark = "the client left"
            finally:
                self._context.engine.sent()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, key = self._context, accepted_key(scope)
        entry = context.running.enter(key, note_of(scope).request_id)
        with entry as cancellation, context.body_memory.reserve() as reservation:
            await self._serve_body(scope, receive, send, reservation, cancellation)

    async def _serve_body(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        reservation: BodyReservation,
        cancellation: Cancellation,
    ) -> None:
        context, note = self._context, note_of(scope)
        refuse_compressed(Headers(scope=scope))
        with context.drain.until_expired():
            body = await read_body(scope, receive, context.config.max_body_bytes, reservation)
        context.engine.check_ready()
        named = client_named_by_router(scope, context.config.client_secrets)
        address = _peer_address(scope)
        caller = Caller(accepted_key(scope), context.trust_cache_salt, address, named)
        call = await self._parse(body, Headers(scope=scope), caller)
        del body  # the call holds whatever is still needed
        # Hypercorn does not cancel the handler when its client disconnects, so receive() is
        # watched.
        watchers = (wait_for_disconnect(receive), context.drain.expired(), cancellation.wait())
        if not call.stream:
            response = await race(self._plain_answer(call, note, reservation), *watchers)
            await response(scope, receive, send)
            return
        events = EventStream(send, self._framing)
        keep_alive = events.keep_alive(context.config.keep_alive_s)
        try:
            # During the last send, Hypercorn reports a disconnect: by then the answer is complete.
            await race(self._stream_answer(call, events, note, reservation), keep_alive, *watchers)
        except ClientDisconnect:
            if not events.ended:
                raise
        except Exception as error:
            if not events.started:
                raise
            if events.ended:
                return
            note.remark = f"broken off ({describe(error).status})"
            await _end_with_error(call, events, error)

    async def _parse(self, body: bytes, headers: Headers, caller: Caller) -> Call[Any]:
        """Parse the body; large bodies are parsed in a thread, one at a time."""
        if len(body) <= SMALL_BYTES:
            return self._endpoint.parse(body, headers, caller)
        async with self._context.body_memory.parsing:
            return await asyncio.to_thread(self._endpoint.parse, body, headers, caller)

    async def _plain_answer(
        self, call: Call[Any], note: RequestNote, reservation: BodyReservation
    ) -> Response:
        # The engine has accepted the requests, so they fit its context: the body is no longer
        # needed.
        return json_response(await self._answers(note).plain(call, reservation.release))

    async def _stream_answer(
        self, call: Call[Any], out: EventStream, note: RequestNote, reservation: BodyReservation
    ) -> None:
        async with self._answers(note).events(call, reservation.release) as events:
            async for event in events:
                await out.write(call.encode(event))
        await out.close(call.end(None))

    def _answers(self, note: RequestNote) -> CallAnswers:
        """CallAnswers that records the times of all deltas and notes them for the request log."""

        def observer(request: Request) -> Observer:
            clock = self._context.metrics.clock(request.conversation)

            def observe(delta: Delta) -> None:
                clock.tick(delta)
                note.take(delta)

            return observe

        return CallAnswers(self._context.engine, observer)


def _peer_address(scope: Scope) -> str:
    """The address of the connection's peer; headers are not trusted."""
    client = scope.get("client")
    return str(client[0]) if client else ""


async def _end_with_error(call: Call[Any], events: EventStream, error: Exception) -> None:
    """Report a failure as the last event, since the status line has been sent already."""
    failure = describe(error)
    if failure.status == 500:
        logger.error("A streamed answer failed.", exc_info=error)
    await events.close(call.end(failure))
