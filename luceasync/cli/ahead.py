"""Reads files of weights ahead of their readers, into the system's page cache: the disk works while
Python imports what is needed to use them.

Owns the threads that do it. Knows no format. Pure: no torch.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

NUM_THREADS = 4
PIECE_BYTES = 4 << 20
PROBE_BYTES = 4096  # at either end of a piece: what they tell of its middle is right mostly
MEMORY_SHARE = 2  # one part in so many of the available memory is filled


class Prefetch:
    """Reads `paths` in threads until it is closed, up to half of the memory that is available. What
    is in the page cache already is left alone. A fault ends it: the reader reports what is wrong.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._lock = threading.Lock()
        self._pieces = _pieces(paths, psutil.virtual_memory().available // MEMORY_SHARE)
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name="prefetch", daemon=True)  # a disk may hang
            for _ in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Read no more; what is being read is not waited for. May be called twice."""
        self._is_closed = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is read. Returns whether it is."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        content = mmap.mmap(-1, PIECE_BYTES)
        try:
            while not self._is_closed and (piece := self._next()) is not None:
                path, begin, end = piece
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if not _is_cached(fd, begin, end):
                        os.preadv(fd, [memoryview(content)[: end - begin]], begin)
                finally:
                    os.close(fd)
        except OSError as error:
            self.close()
            log.debug("weights are not read ahead: %s", error)

    def _next(self) -> tuple[Path, int, int] | None:
        with self._lock:
            return next(self._pieces, None)


def _pieces(paths: Sequence[Path], limit_bytes: int) -> Iterator[tuple[Path, int, int]]:
    """(path, begin, end) of all pieces of the files, up to a limit. Raises OSError."""
    for path in paths:
        num_bytes = min(path.stat().st_size, limit_bytes)
        limit_bytes -= num_bytes
        for begin in range(0, num_bytes, PIECE_BYTES):
            yield path, begin, min(begin + PIECE_BYTES, num_bytes)


def _is_cached(fd: int, begin: int, end: int) -> bool:
    """Whether bytes [begin, end) seem to be in the page cache; False if the system cannot tell."""
    probe = bytearray(PROBE_BYTES)
    try:
        return all(
            os.preadv(fd, [probe], at, os.RWF_NOWAIT) > 0
            for at in (begin, max(begin, end - PROBE_BYTES))
        )
    except OSError:
        return False
