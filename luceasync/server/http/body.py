"""Reads request bodies within limits of size, time and memory, and detects disconnected clients.

Independent of the content of bodies.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from types import TracebackType
from typing import NoReturn, Self

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from luceasync.errors import RequestError, Unavailable
from luceasync.server.malloc_trim import MallocTrim

MAX_BODIES_BYTES = 128 << 20  # of all bodies that the engine has not accepted yet
SMALL_BYTES = 256 << 10  # of each body that are not counted: small bodies are always admitted
LARGE_BYTES = 4 << 20  # memory is trimmed after a body of this size
READ_TIMEOUT_S = 60.0


class BodyMemory:
    """Limits the memory of all bodies together; used on the event loop only."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.malloc_trim = MallocTrim()
        self.parsing = asyncio.Lock()  # parsing a large body holds the GIL for long: one at a time

    def __repr__(self) -> str:
        return f"BodyMemory({self._num_bytes} of {self._max_bytes} bytes)"

    def reserve(self) -> BodyReservation:
        """An empty reservation for one body."""
        return BodyReservation(self)

    def grow(self, counted_bytes: int, more_bytes: int) -> None:
        """Add `more_bytes` to a body that has `counted_bytes`. Raises Unavailable if they do not
        fit beside the other bodies; a single body always fits.
        """
        others_bytes = self._num_bytes - counted_bytes
        if others_bytes and self._num_bytes + more_bytes > self._max_bytes:
            raise Unavailable(
                "The server is busy: the bodies of other requests take up the "
                f"{self._max_bytes} bytes reserved for bodies."
            )
        self._num_bytes += more_bytes

    def shrink(self, num_bytes: int) -> None:
        """Return the counted bytes of a body."""
        self._num_bytes -= num_bytes


class BodyReservation:
    """The memory that one body takes; `release` or the end of the `with` block returns it."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._counted_bytes = 0
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def grow(self, num_bytes: int) -> None:
        """Add bytes that have arrived. Raises Unavailable."""
        self._num_bytes += num_bytes
        more_bytes = max(0, self._num_bytes - SMALL_BYTES) - self._counted_bytes
        self._memory.grow(self._counted_bytes, more_bytes)
        self._counted_bytes += more_bytes

    def release(self) -> None:
        """Return all of it. Idempotent."""
        self._memory.shrink(self._counted_bytes)
        if self._num_bytes >= LARGE_BYTES:
            self._memory.malloc_trim.schedule()
        self._counted_bytes = self._num_bytes = 0


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, reservation: BodyReservation
) -> bytes:
    """Read the whole body, counting its bytes in `reservation`.

    Raises RequestError with status 413 above `max_bytes` or 408 after READ_TIMEOUT_S, Unavailable
    if other bodies take up the memory, and ClientDisconnect.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read_all(scope, receive, max_bytes, reservation)
    except TimeoutError:
        raise RequestError(
            f"The request body did not arrive within {READ_TIMEOUT_S:.0f} s.",
            code="request_timeout",
            status=408,
        ) from None


async def wait_for_disconnect(receive: Receive) -> NoReturn:
    """Wait until the client disconnects; the body must have been read. Raises ClientDisconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def _read_all(
    scope: Scope, receive: Receive, max_bytes: int, reservation: BodyReservation
) -> bytes:
    declared = dict(scope["headers"]).get(b"content-length", b"")
    declared_bytes = int(declared) if declared.isdigit() else 0
    if declared_bytes > max_bytes:
        raise _too_large(max_bytes)
    body = BytesIO()  # not a list of parts, each of which may be a single byte
    more = True
    while more:
        part, more = await _next_part(receive)
        if body.tell() + len(part) > max_bytes:
            raise _too_large(max_bytes)
        try:
            reservation.grow(len(part))
        except Unavailable:
            body.close()
            raise
        body.write(part)
    return body.getvalue()  # does not copy


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"The request body is larger than {max_bytes} bytes.", code="body_too_large", status=413
    )
