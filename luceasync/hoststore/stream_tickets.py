"""Tickets of what a GPU's streams have queued.

Knows no lane and no node.
"""

from __future__ import annotations

import torch

from luceasync.hoststore.arrivals import Arrivals
from luceasync.hoststore.copy_stream import Delivery, sleep_until, wait_for
from luceasync.hoststore.tickets import Call


class Now:
    """What a stream has queued so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def query(self) -> bool:
        """Whether it is over."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait until it is over. Raises TimeoutError."""
        wait_for(self._event.query, "copies between a device and host memory")

    def sleep(self) -> None:
        """Wait asleep until it is over: for a thread that has all the time."""
        sleep_until(self._event)

    def precede(self, stream: torch.cuda.Stream) -> None:
        """See Before."""
        stream.wait_event(self._event)

    def hurry_before(self, stream: torch.cuda.Stream) -> None:
        """As `precede`: all of it is queued."""
        self.precede(stream)


class Queued:
    """An Arrival of copies on a stream; `arrivals` waits for them where somebody wants to hear."""

    def __init__(self, copies: Delivery | Now, arrivals: Arrivals) -> None:
        self._copies = copies
        self._arrivals = arrivals

    @property
    def is_done(self) -> bool:
        """See Ticket."""
        try:
            return self._copies.query()
        except Exception:  # who waits for them is told what it was
            return True

    def wait(self) -> None:
        """See Ticket."""
        self._copies.synchronize()

    def when_done(self, call: Call) -> None:
        """See Ticket."""
        if self.is_done:
            call()
        else:
            self._arrivals.tell(self._copies, call)

    def precede(self, stream: torch.cuda.Stream) -> None:
        """See Before."""
        self._copies.precede(stream)
