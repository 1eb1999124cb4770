"""Copies that arrive when a test says so."""

from __future__ import annotations

from luceasync.host_cache.copy_stream import Callback


class LateTicket:
    """See luceasync.host_cache.copy_stream.Ticket."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: Exception | None = None
        self._calls: list[Callback] = []

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        assert self.is_done, "waiting for copies that never arrive"

    def when_done(self, call: Callback) -> None:
        if self.is_done:
            call()
        else:
            self._calls.append(call)

    def arrive(self, error: Exception | None = None) -> None:
        """The copies are over; `error` is what went wrong with them."""
        self.is_done, self.error = True, error
        calls, self._calls = self._calls, []
        for call in calls:
            call()
