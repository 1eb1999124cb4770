"""The request body up to a limit, and the moment the client leaves.

Owns reading from `receive`. Knows nothing of what the body says.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from types import TracebackType
from typing import NoReturn, Self

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from luceasync.errors import RequestError, Unavailable
from luceasync.server.malloc_trim import GivingBack

# How much memory the bodies of requests take that have not begun, all together. Owns the sum.
# Knows nothing of sockets, nor of what a body says.


MAX_BODIES_BYTES = 128 << 20
SMALL_BYTES = 256 << 10  # of each body that are not counted: small ones always get through
LARGE_BYTES = 4 << 20  # after which memory is given back


class Bodies:
    """Each body holds its bytes until its request is with the engine; event loop only."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.giving_back = GivingBack()
        self.parsing = asyncio.Lock()  # of large ones, each of which has the interpreter for long

    def __repr__(self) -> str:
        return f"Bodies({self._num_bytes} of {self._max_bytes} bytes)"

    def hold(self) -> Held:
        """Room for one body, which holds nothing yet."""
        return Held(self)

    def grow(self, held_bytes: int, more_bytes: int) -> None:
        """A body of `held_bytes` counted bytes gets `more_bytes`. Raises Unavailable where there is
        no room for them beside the others; one alone always has room.
        """
        others_bytes = self._num_bytes - held_bytes
        if others_bytes and self._num_bytes + more_bytes > self._max_bytes:
            raise Unavailable(
                "The server is busy: the bodies of other requests fill the "
                f"{self._max_bytes} bytes that there are for them."
            )
        self._num_bytes += more_bytes

    def shrink(self, num_bytes: int) -> None:
        """A body let go of its counted bytes."""
        self._num_bytes -= num_bytes


class Held:
    """What one body holds; all of it is let go of at the end of the `with`, or before."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
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
        """So many more bytes have come. Raises Unavailable."""
        self._num_bytes += num_bytes
        more_bytes = max(0, self._num_bytes - SMALL_BYTES) - self._counted_bytes
        self._bodies.grow(self._counted_bytes, more_bytes)
        self._counted_bytes += more_bytes

    def release(self) -> None:
        """Nothing is held any more."""
        self._bodies.shrink(self._counted_bytes)
        if self._num_bytes >= LARGE_BYTES:
            self._bodies.giving_back.ask()
        self._counted_bytes = self._num_bytes = 0


READ_TIMEOUT_S = 60.0
DISCARD_TIMEOUT_S = 2.0


async def read_body(scope: Scope, receive: Receive, max_bytes: int, held: Held) -> bytes:
    """Read the whole body into the room that is `held` for it.

    Raises RequestError: 413 past `max_bytes`, 408 past READ_TIMEOUT_S; Unavailable where others
    take up the room; ClientDisconnect if cut.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read_all(scope, receive, max_bytes, held)
    except TimeoutError:
        raise RequestError(
            f"The request body did not arrive within {READ_TIMEOUT_S:.0f} s.",
            code="request_timeout",
            status=408,
        ) from None


async def client_gone(receive: Receive) -> NoReturn:
    """Wait until the client leaves; the body must have been read. Raises ClientDisconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def _read_all(scope: Scope, receive: Receive, max_bytes: int, held: Held) -> bytes:
    declared = dict(scope["headers"]).get(b"content-length", b"")
    declared_bytes = int(declared) if declared.isdigit() else 0
    if declared_bytes > max_bytes:
        await _discard(receive, declared_bytes)
        raise _too_large(max_bytes)
    body = BytesIO()  # not a list of parts: they may be of a byte each
    more = True
    while more:
        part, more = await _next_part(receive)
        if body.tell() + len(part) > max_bytes:
            if more:
                await _discard(receive, max_bytes)
            raise _too_large(max_bytes)
        try:
            held.grow(len(part))
        except Unavailable:
            body.close()
            if more:
                await _discard(receive, max_bytes)
            raise
        body.write(part)
    return body.getvalue()  # no copy of it


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def _discard(receive: Receive, max_bytes: int) -> None:
    """Read on for a moment: a client writing into a closed socket sees a reset, no 413."""
    num_bytes = 0
    more = True
    try:
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while more and num_bytes <= max_bytes:
                part, more = await _next_part(receive)
                num_bytes += len(part)
    except TimeoutError:
        return


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"The request body is larger than {max_bytes} bytes.", code="body_too_large", status=413
    )
