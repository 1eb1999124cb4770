"""Tickets of copies that another process makes.

Knows no node and no lane; who asks for copies says which memory they read or write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from luceasync.hoststore.copy_stream import COPY_TIMEOUT_S
from luceasync.hoststore.tickets import Call


class RemoteTicket:
    """See Ticket. Until the copies are over, their memory is nobody else's."""

    def __init__(self, failure: Callable[[str], Exception], memory: object) -> None:
        """`failure` makes what wait() raises where the process has ended before."""
        self._failure = failure
        self._memory: object = memory
        self._is_over = threading.Event()
        self._have_arrived = False
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def over(self, have_arrived: bool) -> None:
        """They have arrived, or never will. Any thread may say so, once."""
        with self._lock:
            self._have_arrived = have_arrived
            self._memory = None
            calls, self._calls = self._calls, []
            self._is_over.set()
        for call in calls:
            call()

    @property
    def is_done(self) -> bool:
        """See Ticket."""
        return self._is_over.is_set()

    def wait(self) -> None:
        """See Ticket."""
        if not self._is_over.wait(COPY_TIMEOUT_S):
            raise TimeoutError(f"copies of another process: not over within {COPY_TIMEOUT_S:g} s")
        if not self._have_arrived:
            raise self._failure("it has ended, and copies had not arrived")

    def when_done(self, call: Call) -> None:
        """See Ticket."""
        with self._lock:
            if not self._is_over.is_set():
                self._calls.append(call)
                return
        call()
