"""A luceasync-backend on CPUs whose copies between lanes and nodes are late, as on a GPU: they are
made in another thread, and saved data is in place only then.

    python -m tests.pipeline.late_backend ARGUMENT...
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LATE_S, PAUSE_S = 0.4, 0.01


def hold_of(pid: int) -> Path:
    """The file that holds copies in the backends that this process has started."""
    return Path(tempfile.gettempdir()) / f"late-copies-{pid}"


@contextmanager
def held() -> Iterator[None]:
    """No copy in this process's backends arrives within the context, however long that takes."""
    hold = hold_of(os.getpid())
    hold.touch()
    try:
        yield
    finally:
        hold.unlink()


class Late:
    """An Arrival that comes after LATE_S, and not while copies are held."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._is_over = threading.Event()
        threading.Thread(target=self._arrive, args=[finish], daemon=True).start()

    def _arrive(self, finish: Callable[[], None]) -> None:
        time.sleep(LATE_S)
        while hold_of(os.getppid()).exists():
            time.sleep(PAUSE_S)
        finish()
        with self._lock:
            self._is_over.set()
        for call in self._calls:
            call()

    @property
    def is_done(self) -> bool:
        return self._is_over.is_set()

    def wait(self) -> None:
        self._is_over.wait()

    def when_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self.is_done:
                self._calls.append(call)
                return
        call()


def be_late() -> None:
    """Make copies late from now on."""
    from luceasync.host_cache.copies import DirectCopies

    save, restore = DirectCopies.save, DirectCopies.restore

    def save_late(self: Any, lane: int, runs: Any, rows: Any, state: Any, *more: Any) -> Any:
        kept = [None if region is None else bytearray(len(region)) for region in (rows, state)]
        save(self, lane, runs, *(each and memoryview(each) for each in kept), *more)

        def finish() -> None:
            for region, own in zip((rows, state), kept, strict=True):
                if region is not None:
                    region[:] = own

        return Late(finish)

    def restore_late(self: Any, lane: int, pairs: Any, memory: Any, after: Any) -> Any:
        for each in after:
            each.wait()
        restore(self, lane, pairs, memory, after)
        return Late(lambda: None)

    DirectCopies.save, DirectCopies.restore = save_late, restore_late  # type: ignore[method-assign]


if __name__ == "__main__":
    be_late()
    from luceasync.backend.app import main

    main()
