"""Lines of the log written by a thread of their own.

Owns the lines that wait. A terminal that was stopped, or a pipe that nobody reads, must not hold up
the event loop, which logs a line for each request. Knows no line.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)s %(message)s"
MAX_WAITING = 10_000  # lines; further ones are dropped
CLOSE_TIMEOUT_S = 1.0


class BesideHandler(logging.Handler):
    """Writes to `out` in the background; `close` waits for what is left, but not for long."""

    def __init__(self, out: TextIO, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self.format(record))
        except Exception:  # as every handler of the standard library: no log line ends a server
            self.handleError(record)

    def close(self) -> None:
        self._put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        super().close()

    def _put(self, line: str | None) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            return

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._out.write(line + "\n")
                self._out.flush()
            except (OSError, ValueError):  # whoever read it is gone
                return
