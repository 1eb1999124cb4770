"""How fast places become free where all lanes are taken, and when whoever found none may come back.

Owns the measured rate. Knows neither clients nor queues; times come in as arguments.
"""

from __future__ import annotations

import math

MAX_WAIT_S = 60
NEW_SHARE = 0.1  # of the mean that the newest of the measured times has
FIRST_GUESS_S = 1.0


class Pace:
    """Seconds from one end to the next, while every lane is at work."""

    def __init__(self) -> None:
        self._mean_s = FIRST_GUESS_S
        self._has_measured = False
        self._since_s: float | None = None  # the last end, or when all lanes were taken
        self._num_told = 0  # who found no place since then: they come back one after the other

    def filled(self, now_s: float) -> None:
        """All lanes are taken; nothing new where they were before."""
        self._since_s = now_s if self._since_s is None else self._since_s

    def ended(self, now_s: float, *, is_full: bool) -> None:
        """A place is free; `is_full`: all lanes are taken even so."""
        if self._since_s is not None:
            seconds = max(0.0, now_s - self._since_s)
            share = NEW_SHARE if self._has_measured else 1.0
            self._mean_s += share * (seconds - self._mean_s)
            self._has_measured = True
        self._since_s = now_s if is_full else None
        self._num_told = 0

    def told(self, num_places: int) -> None:
        """Somebody who wants so many places was sent away until `wait_s`."""
        self._num_told += num_places

    def wait_s(self, now_s: float, num_places: int = 1) -> int:
        """Whole seconds, 1 to 60, until so many more are likely to be free. The longer none has
        become free, the longer it may take.
        """
        silent_s = 0.0 if self._since_s is None else now_s - self._since_s
        each_s = max(self._mean_s, silent_s)
        wait_s = each_s * (num_places + self._num_told)
        return max(1, min(MAX_WAIT_S, math.ceil(wait_s - 1e-9)))
