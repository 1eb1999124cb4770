"""A call that generates nothing: a body is read, and something is looked up.

Owns nothing but the form: limits, keys and clients that leave are those of every other call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

from luceasync.request import Request, Stream
from luceasync.server.failures import Failure


class Lookup:
    """See luceasync.server.family.Call. `look` gives the answer, which is sent as JSON."""

    requests: Sequence[Request] = ()
    stream = False

    def __init__(self, look: Callable[[], Awaitable[object]]) -> None:
        self._look = look

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[None, None]:
        """None."""
        return
        yield  # it is a generator

    def encode(self, event: None) -> bytes:
        raise AssertionError("there are no events")

    def end(self, failure: Failure | None) -> bytes:
        raise AssertionError("it is never streamed")

    async def fold(self, events: AsyncIterator[None]) -> object:
        return await self._look()
