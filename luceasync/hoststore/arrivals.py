"""A thread that waits for copies of a device, so that nobody else has to ask for them.

Sleeps while they are under way. Knows no lane, no node and nobody who listens.
"""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import Protocol

from luceasync.hoststore.copy_stream import COPY_TIMEOUT_S
from luceasync.hoststore.tickets import Call

log = logging.getLogger(__name__)


class Awaited(Protocol):
    """What the thread can wait for."""

    def sleep(self) -> None:
        """Return when it is over. Raises what went wrong."""
        ...


class Arrivals:
    """Waits for one after the other, in the order in which they were named."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Awaited, Call] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, awaited: Awaited, call: Call) -> None:
        """Call when it is over, well or not. The thread starts when it is needed first."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((awaited, call))

    def close(self) -> None:
        """End the thread once all is over that was named. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(COPY_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            awaited, call = item
            try:
                awaited.sleep()
            except Exception as error:  # raised again where somebody waits for the ticket
                log.debug("copies of a device have failed: %s", error)
            call()
            del item, awaited, call  # what they hold alive is not needed until the next comes
