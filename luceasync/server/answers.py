"""The answer to a Call: the engine runs its requests, and their streams become events or one body.

All answers are made here, over HTTP and in this process. Independent of sockets and bodies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from luceasync.errors import (
    DisplacedFromQueue,
    GenerationFailed,
    HostMemoryExhausted,
    RequestError,
    Unavailable,
)
from luceasync.request import Delta, Engine, Finish, Request, Stream
from luceasync.server.family import Call

Observer = Callable[[Delta], None]


def observe_nothing(request: Request) -> Observer:
    """The observer of a request that is not observed."""
    return lambda delta: None


class CallAnswers:
    """Answers calls with `engine`. `observer` is called with each request before it is queued and
    returns an Observer, which gets every delta before the call does. `closed` is called when the
    streams of a call are closed.
    """

    def __init__(
        self,
        engine: Engine,
        observer: Callable[[Request], Observer] = observe_nothing,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._observer = observer
        self._closed = closed

    async def plain(self, call: Call[Any], accepted: Callable[[], None] = lambda: None) -> object:
        """The fold of all events. `accepted` is called once the engine has accepted all requests.

        Raises what `Engine.open` and AnswerStream raise.
        """
        async with self.events(call, accepted) as events:
            return await call.fold(events)

    @asynccontextmanager
    async def events(
        self, call: Call[Any], accepted: Callable[[], None] = lambda: None
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """An async context manager with the events as they arrive. Leaving the `async with`, in any
        way, closes the streams and frees their lanes.
        """
        opening = self._open(call.requests)
        try:
            async with opening as streams, aclosing(call.events(streams)) as events:
                accepted()
                yield events
        finally:
            self._closed()

    @asynccontextmanager
    async def _open(self, requests: Sequence[Request]) -> AsyncIterator[Sequence[Stream]]:
        async with AsyncExitStack() as closing:
            streams = []
            for request in requests:
                observe = self._observer(request)
                stream = await self._engine.open(request)
                closing.push_async_callback(stream.aclose)
                streams.append(AnswerStream(stream, request.num_choices, observe))
            yield streams


class AnswerStream:
    """A Stream whose deltas are observed, and whose failures are exceptions.

    `__anext__` raises GenerationFailed, RequestError, DisplacedFromQueue, HostMemoryExhausted or
    Unavailable unless all `num_choices` choices end normally.
    """

    def __init__(self, stream: Stream, num_choices: int, observe: Observer) -> None:
        self._stream = stream
        self._num_open = num_choices
        self._observe = observe

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
        self._observe(delta)
        if delta.finish is not None:
            _raise_failure(delta.finish)
            self._num_open -= 1
        return delta

    async def aclose(self) -> None:
        await self._stream.aclose()


def _raise_failure(finish: Finish) -> None:
    if finish.reason == "error":
        message = finish.error or "The generation failed."
        match finish.error_kind:
            case "request":
                raise RequestError(message, code="cannot_be_followed")
            case "gave_way":
                raise DisplacedFromQueue(finish.retry_after_s)
            case "unavailable":
                raise Unavailable(message, finish.retry_after_s)
            case "kv_host_memory":
                raise HostMemoryExhausted(message, finish.retry_after_s)
            case "failed":
                raise GenerationFailed(message)
    if finish.reason == "cancelled":
        raise Unavailable(finish.error or "The generation was cancelled.")
