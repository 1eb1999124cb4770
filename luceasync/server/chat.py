"""POST /v1/chat/completions: one request from its body to the last byte of its answer.

Owns the order of things and who may end the work. Knows nothing of the engine behind the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from luceasync.config import ServerConfig
from luceasync.errors import Unavailable
from luceasync.request import Engine, Request, Stream
from luceasync.server.auth import accepted_key
from luceasync.server.body import client_gone, read_body
from luceasync.server.chat_events import AnswerFold, ChatEvents
from luceasync.server.drain import Drain
from luceasync.server.failures import describe
from luceasync.server.metrics import MeasuredStream, Metrics
from luceasync.server.race import race
from luceasync.server.schema import ChatCall, parse_chat
from luceasync.server.sse import DONE, EventStream, encode_event
from luceasync.server.tenant import Caller

logger = logging.getLogger(__name__)


class ChatCompletions:
    """The ASGI endpoint; a client that leaves, or a shutdown, closes the Stream at once."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        drain: Drain,
        metrics: Metrics,
        trust_cache_salt: bool,
    ) -> None:
        self._engine = engine
        self._config = config
        self._drain = drain
        self._metrics = metrics
        self._trust_cache_salt = trust_cache_salt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._drain.admit():
            try:
                await self._serve(scope, receive, send)
            except ClientDisconnect:
                logger.debug("The client left before its answer was complete.")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        reading = read_body(scope, receive, self._config.max_body_bytes)
        body = await race(reading, self._drain.expired())
        require_ready(self._engine)
        caller = Caller(accepted_key(scope), self._trust_cache_salt)
        call = parse_chat(body, self._engine.card.name, caller)
        # Hypercorn cancels no handler whose client left: receive() is watched beside the work.
        endings = (client_gone(receive), self._drain.expired())
        if not call.stream:
            response = await race(self._plain(replace(call, include_usage=True)), *endings)
            await response(scope, receive, send)
            return
        events = EventStream(send)
        keep_alive = events.keep_alive(self._config.keep_alive_s)
        try:
            await race(self._streamed(call, events), keep_alive, *endings)
        except ClientDisconnect:
            raise
        except Exception as error:
            if not events.started:
                raise
            await _end_with_error(events, error)

    async def _plain(self, call: ChatCall) -> Response:
        async with self._open(call.request) as stream:
            answer = ChatEvents(call, self._engine.card.name, stream.num_prompt_tokens)
            fold = AnswerFold()
            async with aclosing(answer.chunks(stream)) as chunks:
                async for chunk in chunks:
                    fold.take(chunk)
        return Response(msgspec.json.encode(fold.completion()), media_type="application/json")

    async def _streamed(self, call: ChatCall, events: EventStream) -> None:
        async with self._open(call.request) as stream:
            answer = ChatEvents(call, self._engine.card.name, stream.num_prompt_tokens)
            async with aclosing(answer.chunks(stream)) as chunks:
                async for chunk in chunks:
                    await events.write(encode_event(chunk))
        await events.close(DONE)

    @asynccontextmanager
    async def _open(self, request: Request) -> AsyncIterator[Stream]:
        """The engine's Stream, measured, and closed on every way out."""
        clock = self._metrics.clock()
        stream = await self._engine.open(request)
        try:
            yield MeasuredStream(stream, clock)
        finally:
            await stream.aclose()


def require_ready(engine: Engine) -> None:
    """Raise Unavailable unless the model is loaded."""
    status = engine.status()
    if not status.ready:
        raise Unavailable(status.detail)


async def _end_with_error(events: EventStream, error: Exception) -> None:
    """The status went out already: the failure becomes the last event, without a [DONE]."""
    failure = describe(error)
    if failure.status == 500:
        logger.error("A streamed answer failed.", exc_info=error)
    await events.close(encode_event(failure.body()))
