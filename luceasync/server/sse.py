"""Server-sent events: how one is written, and the stream that they go out on.

Owns the start of the response and its silence (keep-alive). Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import Send

KEEP_ALIVE = b": keep-alive\n\n"

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_encoder = msgspec.json.Encoder()


def encode_event(payload: object, name: str | None = None) -> bytes:
    """One event whose data is `payload` as JSON, which has no raw newlines."""
    named = b"" if name is None else b"event: " + name.encode() + b"\n"
    return named + b"data: " + _encoder.encode(payload) + b"\n\n"


class EventStream:
    """The body of one event-stream response; the headers go out with the first bytes.

    `started` tells whether an HTTP status has been promised: before that a failure can still become
    a proper error response.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        # The answer and the keep-alive task write to one connection: start and body must not
        # overtake. No lock: to find it free costs each token more than this.
        self._is_taken = False
        self._freed = asyncio.Event()
        self._now_s = asyncio.get_running_loop().time
        self._last_write_s = self._now_s()
        self.started = False

    async def write(self, events: bytes) -> None:
        """Send `events` (whole events only), and the headers first if nothing went out yet."""
        await self._write(events, is_last=False)
        self._last_write_s = self._now_s()

    async def close(self, events: bytes = b"") -> None:
        """Send the last `events` and end the response."""
        await self._write(events, is_last=True)

    async def keep_alive(self, interval_s: float) -> None:
        """Write a comment after every `interval_s` of silence; runs until it is cancelled."""
        while True:
            silence_s = self._now_s() - self._last_write_s
            if silence_s < interval_s:
                await asyncio.sleep(interval_s - silence_s)
            else:
                await self.write(KEEP_ALIVE)

    async def _write(self, events: bytes, *, is_last: bool) -> None:
        while self._is_taken:
            self._freed.clear()
            await self._freed.wait()
        self._is_taken = True
        try:
            if not self.started:
                await self._start()
            body = {"type": "http.response.body", "body": events, "more_body": not is_last}
            await self._send(body)
        finally:
            self._is_taken = False
            self._freed.set()

    async def _start(self) -> None:
        self.started = True
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": list(HEADERS)},
        )
