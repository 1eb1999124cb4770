"""What a child writes to its standard error: read without rest, the last lines kept for errors.

Owns a thread and a pipe's reading end. A pipe that nobody reads would stop the child.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

from luceasync.ipc.threads import has_ended

NUM_LINES = 40
MAX_LINE_BYTES = 4096  # a longer line is cut into several
READ_BYTES = 64 << 10


class LogLines:
    """The lines of one child."""

    def __init__(self, fd: int, on_line: Callable[[str], None]) -> None:
        """Takes over the descriptor. `on_line` is called in the thread, with each line."""
        self._fd = fd
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._rest = b""
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_over = threading.Event()
        self._closing, self._is_closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._read_all, name="child's log", daemon=True)
        self._thread.start()

    def last(self, settle_s: float = 0.0) -> list[str]:
        """The last lines; waits up to `settle_s` for a child that has ended to have said all."""
        self._is_over.wait(settle_s)
        return list(self._lines)

    def close(self) -> None:
        """Stop reading. May be called twice, also at once."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            os.eventfd_write(self._stop, 1)
            if has_ended(self._thread):
                os.close(self._stop)
                os.close(self._fd)

    def _read_all(self) -> None:
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        waiting.register(self._stop, select.POLLIN)
        os.set_blocking(self._fd, False)
        while True:
            happened = dict(waiting.poll())
            if self._fd in happened and not self._read_some():
                break
            if self._stop in happened:
                break
        self._take(b"\n" if self._rest else b"")
        self._is_over.set()

    def _read_some(self) -> bool:
        """Whether there may be more."""
        try:
            came = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return True
        self._take(came)
        return bool(came)

    def _take(self, came: bytes) -> None:
        *lines, self._rest = (self._rest + came).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        for line in lines:
            text = line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
            self._lines.append(text)
            self._on_line(text)
