"""Frames of HTTP/2 as they come in, one at a time, and what a client may spend on them.

Owns where a frame ends, the allowances, and what h2, which reads the frames, is told to bound.
Knows no stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

MAX_STREAMS = 100
MAX_HEADER_LIST_BYTES = 16384
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
MAX_FRAME_BYTES = 16384  # of a frame's payload, as we announce it

DATA, HEADERS, RST_STREAM = 0, 1, 3
SMALL_DATA_BYTES = 256

# Whoever leaves all streams at once is in a hurry; whoever does it again within five seconds
# is no client.
MAX_RESETS, RESETS_PER_S = 100.0, 20.0
# Pings, settings, windows, continuations and crumbs of bodies. What we send is paid back: clients
# say for it how much more they would read.
MAX_CONTROLS, CONTROLS_PER_S = 1000.0, 200.0


class Allowance:
    """`most` at once, and `per_s` more as time passes."""

    def __init__(
        self, most: float, per_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._per_s = per_s
        self._clock = clock
        self._left = most
        self._then = clock()

    def take(self) -> bool:
        """Spend one; False where none is left."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._then) * self._per_s)
        self._then = now
        self._left -= 1.0
        return self._left >= 0.0

    def give(self) -> None:
        """One more may be spent."""
        self._left = min(self._most, self._left + 1.0)


class Frames:
    """Cuts what comes in into whole frames; one too long is given as it is, for h2 to refuse."""

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._begun = False

    def cut(self, data: bytes) -> Iterator[bytes]:
        """The preface, and then frame after frame, as far as they have come."""
        self._waiting += data
        while end := self._end():
            frame = bytes(self._waiting[:end])
            del self._waiting[:end]
            yield frame

    def _end(self) -> int:
        """Where the next piece ends; 0: it has not come yet."""
        num_bytes = len(self._waiting)
        if not self._begun:
            wrong = not PREFACE.startswith(self._waiting[: len(PREFACE)])
            self._begun = wrong or num_bytes >= len(PREFACE)
            return num_bytes if wrong else len(PREFACE) * self._begun
        if num_bytes < HEADER_BYTES:
            return 0
        payload_bytes = int.from_bytes(self._waiting[:3], "big")
        if payload_bytes > MAX_FRAME_BYTES:
            return num_bytes
        return HEADER_BYTES + payload_bytes if num_bytes >= HEADER_BYTES + payload_bytes else 0


class Purse:
    """What one connection may spend on frames that ask for nothing."""

    def __init__(self) -> None:
        self._resets = Allowance(MAX_RESETS, RESETS_PER_S)
        self._controls = Allowance(MAX_CONTROLS, CONTROLS_PER_S)

    def pay_for(self, frame: bytes) -> bool:
        """Whether `frame` may be read: streams begin and bodies come for nothing."""
        kind = frame[3] if len(frame) >= HEADER_BYTES else None
        if kind == RST_STREAM:
            return self._resets.take()
        if kind == HEADERS or (kind == DATA and len(frame) >= SMALL_DATA_BYTES):
            return True
        return self._controls.take()

    def pay_for_reset(self) -> bool:
        """Whether we may end a stream for something that the client did."""
        return self._resets.take()

    def paid_back(self) -> None:
        """The client was sent a piece of an answer."""
        self._controls.give()


class _BoundedConnection(H2Connection):
    MAX_CLOSED_STREAMS = 1000  # that are remembered, so that a late frame is not an error


def bounded_connection() -> H2Connection:
    """Our side of a connection, which tells the client so many streams and headers."""
    connection = _BoundedConnection(H2Configuration(client_side=False, header_encoding=None))
    connection.local_settings = Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
        },
    )
    connection.decoder.max_header_list_size = MAX_HEADER_LIST_BYTES
    return connection
