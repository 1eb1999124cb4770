"""Responses: JSON, and streams of events, as server-sent events or lines of JSON.

Owns the start of an event stream and its keep-alives. Independent of the content of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Send


@dataclass(frozen=True, slots=True)
class Framing:
    """How a family sends its events; `keep_alive`: bytes without meaning, sent between events."""

    media_type: str
    keep_alive: bytes

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of a stream."""
        charset = b"; charset=utf-8" if self.media_type.startswith("text/") else b""
        return [
            (b"content-type", self.media_type.encode() + charset),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]


SERVER_SENT = Framing("text/event-stream", b": keep-alive\n\n")
# Readers would take an empty line for invalid JSON; a space becomes part of the next line.
JSON_LINES = Framing("application/x-ndjson", b" ")

_encoder = msgspec.json.Encoder()


def json_response(
    payload: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """`payload` as JSON."""
    return Response(_encoder.encode(payload), status, headers, media_type="application/json")


def encode_event(payload: object, name: str | None = None) -> bytes:
    """One event whose data is `payload` as JSON, which has no raw newlines."""
    named = b"" if name is None else b"event: " + name.encode() + b"\n"
    return named + b"data: " + _encoder.encode(payload) + b"\n\n"


def encode_line(payload: object) -> bytes:
    """`payload` as a line of JSON."""
    return _encoder.encode(payload) + b"\n"


class EventStream:
    """The body of one event-stream response; the headers go out with the first bytes.

    While `started` is false, a failure can still become a proper error response. Once `ended`, the
    last bytes are being sent and nothing can be added.
    """

    def __init__(self, send: Send, framing: Framing = SERVER_SENT) -> None:
        self._send = send
        self._framing = framing
        # The answer and the keep-alive task write to one connection, and the start must go out
        # before any body. Not an asyncio.Lock: even without contention, taking one costs each token
        # more than this.
        self._is_sending = False
        self._sent = asyncio.Event()
        self._now_s = asyncio.get_running_loop().time
        self._last_write_s = self._now_s()
        self.started = False
        self.ended = False

    async def write(self, events: bytes) -> None:
        """Send `events`, all of them complete; the headers first, if nothing has been sent yet."""
        await self._write(events, is_last=False)
        self._last_write_s = self._now_s()

    async def close(self, events: bytes = b"") -> None:
        """Send the last `events` and end the response."""
        self.ended = True
        await self._write(events, is_last=True)

    async def keep_alive(self, interval_s: float) -> None:
        """Write a keep-alive after every `interval_s` of silence, until cancelled."""
        while True:
            silence_s = self._now_s() - self._last_write_s
            if silence_s < interval_s:
                await asyncio.sleep(interval_s - silence_s)
            else:
                await self.write(self._framing.keep_alive)

    async def _write(self, events: bytes, *, is_last: bool) -> None:
        while self._is_sending:
            self._sent.clear()
            await self._sent.wait()
        self._is_sending = True
        try:
            if not self.started:
                await self._start()
            body = {"type": "http.response.body", "body": events, "more_body": not is_last}
            await self._send(body)
        finally:
            self._is_sending = False
            self._sent.set()

    async def _start(self) -> None:
        self.started = True
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": self._framing.headers}
        )
