"""One request from its body to the last byte of its answer, whatever API it is of.

Owns the order of things and who may end the work. Knows nothing of what a body or an event says,
nor of the engine behind the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from luceasync.config import ServerConfig
from luceasync.errors import GaveWay, GenerationFailed, NoHostMemory, RequestError, Unavailable
from luceasync.request import Delta, Engine, Finish, Request, Stream
from luceasync.server.drain import Drain, race
from luceasync.server.failures import describe
from luceasync.server.family import Call, Endpoint
from luceasync.server.http.auth import Caller, accepted_key
from luceasync.server.http.body import SMALL_BYTES, Bodies, Held, client_gone, read_body
from luceasync.server.http.responses import EventStream
from luceasync.server.metrics import AnswerClock, Metrics
from luceasync.server.request_log import RequestNote, note_of
from luceasync.server.running import Ending, Running

# The deltas of one request on their way from the engine to a family. Owns that they are timed
# and noted, and that a choice which failed is an exception. Knows no API.


class AnswerStream:
    """A Stream of `num_choices` that all end well, or `__anext__` raises GenerationFailed,
    RequestError, GaveWay, NoHostMemory or Unavailable.
    """

    def __init__(
        self, stream: Stream, num_choices: int, clock: AnswerClock, note: RequestNote
    ) -> None:
        self._stream = stream
        self._num_open = num_choices
        self._clock = clock
        self._note = note

    @property
    def num_prompt_tokens(self) -> int:
        return self._stream.num_prompt_tokens

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        try:
            delta = await self._stream.__anext__()
        except StopAsyncIteration:
            if self._num_open > 0:
                raise GenerationFailed(
                    "The generation ended before every choice was finished."
                ) from None
            raise
        self._clock.tick(delta)
        self._note.take(delta)
        if delta.finish is not None:
            _raise_failure(delta.finish)
            self._num_open -= 1
        return delta

    async def aclose(self) -> None:
        await self._stream.aclose()


def _raise_failure(finish: Finish) -> None:
    if finish.reason == "error":
        words = finish.error or "The generation failed."
        match finish.error_kind:
            case "request":
                raise RequestError(words, code="cannot_be_followed")
            case "gave_way":
                raise GaveWay(finish.retry_after_s)
            case "unavailable":
                raise Unavailable(words, finish.retry_after_s)
            case "kv_host_memory":
                raise NoHostMemory(words, finish.retry_after_s)
            case "failed":
                raise GenerationFailed(words)
    if finish.reason == "cancelled":
        raise Unavailable(finish.error or "The generation was cancelled.")


# Whether the model is there to answer. Owns the refusal while it is not. Knows nothing of why.


def require_ready(engine: Engine) -> None:
    """Raise Unavailable unless the model is loaded."""
    status = engine.status()
    if not status.ready:
        raise Unavailable(status.detail, status.retry_after_s)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class House:
    """What every answer of one app is served with."""

    engine: Engine
    config: ServerConfig
    drain: Drain
    metrics: Metrics
    trust_cache_salt: bool
    bodies: Bodies = field(default_factory=Bodies)
    running: Running = field(default_factory=Running)


class Answering:
    """The ASGI app of one endpoint; a client that leaves, or a shutdown, closes its Streams at
    once.
    """

    def __init__(self, endpoint: Endpoint, house: House) -> None:
        self._endpoint = endpoint
        self._house = house

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._house.drain.admit():
            try:
                await self._serve(scope, receive, send)
            except ClientDisconnect:
                note_of(scope).remark = "the client left"

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        running, key = self._house.running, accepted_key(scope)
        entry = running.enter(key, note_of(scope).request_id)
        with entry as ending, self._house.bodies.hold() as held:
            await self._serve_body(scope, receive, send, held, ending)

    async def _serve_body(
        self, scope: Scope, receive: Receive, send: Send, held: Held, ending: Ending
    ) -> None:
        house, note = self._house, note_of(scope)
        reading = read_body(scope, receive, house.config.max_body_bytes, held)
        body = await race(reading, house.drain.expired())
        require_ready(house.engine)
        caller = Caller(accepted_key(scope), house.trust_cache_salt, _peer_of(scope))
        call = await self._parsed(body, Headers(scope=scope), caller)
        del body  # what is left of it is in the call
        # Hypercorn cancels no handler whose client left: receive() is watched beside the work.
        endings = (client_gone(receive), house.drain.expired(), ending.wait())
        if not call.stream:
            response = await race(self._plain(call, note, held), *endings)
            await response(scope, receive, send)
            return
        events = EventStream(send)
        keep_alive = events.keep_alive(house.config.keep_alive_s)
        try:
            await race(self._streamed(call, events, note, held), keep_alive, *endings)
        except ClientDisconnect:
            raise
        except Exception as error:
            if not events.started:
                raise
            note.remark = f"broken off ({describe(error).status})"
            await _end_with_error(call, events, error)

    async def _parsed(self, body: bytes, headers: Headers, caller: Caller) -> Call[Any]:
        """What the body says; a large one is read beside the loop, and one at a time."""
        if len(body) <= SMALL_BYTES:
            return self._endpoint.parse(body, headers, caller)
        async with self._house.bodies.parsing:
            return await asyncio.to_thread(self._endpoint.parse, body, headers, caller)

    async def _plain(self, call: Call[Any], note: RequestNote, held: Held) -> Response:
        opening = self._open(call.requests, note, held)
        async with opening as streams, aclosing(call.events(streams)) as events:
            answer = await call.fold(events)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _streamed(
        self, call: Call[Any], out: EventStream, note: RequestNote, held: Held
    ) -> None:
        opening = self._open(call.requests, note, held)
        async with opening as streams, aclosing(call.events(streams)) as events:
            async for event in events:
                await out.write(call.encode(event))
        await out.close(call.end(None))

    @asynccontextmanager
    async def _open(
        self, requests: Sequence[Request], note: RequestNote, held: Held
    ) -> AsyncIterator[Sequence[Stream]]:
        """The engine's Streams, measured and checked, and closed on every way out. What the body
        held is let go of: the engine has taken the requests, which fit its context.
        """
        async with AsyncExitStack() as closing:
            streams = []
            for request in requests:
                clock = self._house.metrics.clock()
                stream = await self._house.engine.open(request)
                closing.push_async_callback(stream.aclose)
                streams.append(AnswerStream(stream, request.num_choices, clock, note))
            held.release()
            yield streams


def _peer_of(scope: Scope) -> str:
    """The address of the connection's other end, as the socket has it; no header is believed."""
    client = scope.get("client")
    return str(client[0]) if client else ""


async def _end_with_error(call: Call[Any], events: EventStream, error: Exception) -> None:
    """The status went out already: the failure becomes the last event."""
    failure = describe(error)
    if failure.status == 500:
        logger.error("A streamed answer failed.", exc_info=error)
    await events.close(call.end(failure))
