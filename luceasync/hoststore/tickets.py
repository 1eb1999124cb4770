"""When copies that were asked for have arrived: nobody has to ask again and again.

Knows no device, no node and no thread; who makes copies says when they are over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

Call = Callable[[], None]


class Ticket(Protocol):
    """Copies on their way. Any thread may ask."""

    @property
    def is_done(self) -> bool:
        """Whether they have arrived, or failed."""
        ...

    def wait(self) -> None:
        """Wait until they have arrived. Raises what went wrong with them, and TimeoutError."""
        ...

    def when_done(self, call: Call) -> None:
        """Call once they have arrived or failed: now, where that is so already, else later from
        another thread. What is called must not wait.
        """
        ...


class Arrived:
    """Of copies that were made at once."""

    @property
    def is_done(self) -> bool:
        """See Ticket."""
        return True

    def wait(self) -> None:
        """They are there."""

    def when_done(self, call: Call) -> None:
        """See Ticket."""
        call()


class _Together:
    """Several tickets as one."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tuple(tickets)

    @property
    def is_done(self) -> bool:
        return all(ticket.is_done for ticket in self._tickets)

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()

    def when_done(self, call: Call) -> None:
        lock, num_left = threading.Lock(), len(self._tickets)

        def one_is_done() -> None:
            nonlocal num_left
            with lock:
                num_left -= 1
                is_last = num_left == 0
            if is_last:
                call()

        for ticket in self._tickets:
            ticket.when_done(one_is_done)


def together(tickets: Sequence[Ticket]) -> Ticket:
    """A ticket that is done when all of them are."""
    return tickets[0] if len(tickets) == 1 else _Together(tickets) if tickets else Arrived()
