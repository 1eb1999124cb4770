"""Server-sent events: how one is written, and the stream that they go out on.

Owns the start of the response and its silence (keep-alive). Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
from starlette.types import Send

from luceasync.request import Delta, Stream

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


# The deltas of several streams as one, each as soon as it comes. Owns the waiting. Knows
# nothing of what deltas say.


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The number of a stream and its next delta, until all have ended. Raises what one raises."""
    waiting = {_next(stream): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                delta = task.result()
                if delta is not None:
                    waiting[_next(streams[number])] = number
                    yield number, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _next(stream: Stream) -> asyncio.Task[Delta | None]:
    return asyncio.ensure_future(_next_or_none(stream))


async def _next_or_none(stream: Stream) -> Delta | None:
    return await anext(aiter(stream), None)
