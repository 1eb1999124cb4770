"""The request body up to a limit, and the moment the client leaves.

Owns reading from `receive`. Knows nothing of what the body says.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import NoReturn

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from luceasync.errors import RequestError, Unavailable
from luceasync.server.bodies import Held

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
