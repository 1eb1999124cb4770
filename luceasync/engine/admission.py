"""How many choices are in the engine and whose they are; refuses requests when it is full.

Owns the counts and the measured rate at which choices end. Does not know lanes or streams.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from luceasync.engine.scheduler import may_enter
from luceasync.errors import QueueFull

MAX_WAIT_S = 60
NEWEST_WEIGHT = 0.1  # of the newest measured time in the mean
FIRST_GUESS_S = 1.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many choices may be in the engine, and when evicted clients may retry."""

    num_places: int
    retry_after_s: int


class Admission:
    """`num_lanes` choices run, `max_queue` more may wait. Event loop only."""

    def __init__(
        self, num_lanes: int, max_queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_lanes = num_lanes
        self._max_queue = max_queue
        self._num_held = Counter[str]()  # by client: choices that have not finished
        self._clock = clock
        self._rate = CompletionRate()

    def __repr__(self) -> str:
        return f"Admission({self._num_held.total()} of {self._num_lanes} + {self._max_queue})"

    @property
    def capacity(self) -> Capacity:
        """The capacity for all clients together."""
        return Capacity(self._num_lanes + self._max_queue, self._rate.wait_s(self._clock()))

    def check(self, num_choices: int, client: str = "") -> None:
        """Raise QueueFull unless there is a place for each choice, or another client that holds
        more can be evicted for them."""
        num_places = self._num_lanes + self._max_queue
        if not may_enter(self._num_held, num_places, client, num_choices):
            num_held = self._num_held.total()
            num_missing = max(1, num_held + num_choices - num_places)
            wait_s = self._rate.wait_s(self._clock(), num_missing)
            self._rate.refused(num_missing)
            raise QueueFull(max(0, num_held - self._num_lanes), wait_s)

    def enter(self, num_choices: int, client: str = "") -> None:
        """Count submitted choices."""
        self._num_held[client] += num_choices
        if self._is_full:
            self._rate.filled(self._clock())

    def leave(self, client: str = "") -> None:
        """Count one finished choice."""
        self._num_held[client] -= 1
        if not self._num_held[client]:
            del self._num_held[client]
        self._rate.ended(self._clock(), is_full=self._is_full)

    @property
    def _is_full(self) -> bool:
        return self._num_held.total() >= self._num_lanes


class CompletionRate:
    """Mean seconds between two completed choices, while all lanes are taken."""

    def __init__(self) -> None:
        self._mean_s = FIRST_GUESS_S
        self._has_measured = False
        self._since_s: float | None = None  # the last end, or when all lanes were taken
        # Places refused since then: their clients come back one after the other.
        self._num_refused = 0

    def filled(self, now_s: float) -> None:
        """All lanes are taken now. No-op if they were before."""
        self._since_s = now_s if self._since_s is None else self._since_s

    def ended(self, now_s: float, *, is_full: bool) -> None:
        """A choice has ended; `is_full`: all lanes are still taken."""
        if self._since_s is not None:
            seconds = max(0.0, now_s - self._since_s)
            weight = NEWEST_WEIGHT if self._has_measured else 1.0
            self._mean_s += weight * (seconds - self._mean_s)
            self._has_measured = True
        self._since_s = now_s if is_full else None
        self._num_refused = 0

    def refused(self, num_places: int) -> None:
        """A client that wants `num_places` was told to wait for `wait_s`."""
        self._num_refused += num_places

    def wait_s(self, now_s: float, num_places: int = 1) -> int:
        """Whole seconds, 1 to 60, until that many places are likely to be free. The longer no
        choice has ended, the longer the next one is expected to take."""
        silent_s = 0.0 if self._since_s is None else now_s - self._since_s
        each_s = max(self._mean_s, silent_s)
        wait_s = each_s * (num_places + self._num_refused)
        return max(1, min(MAX_WAIT_S, math.ceil(wait_s - 1e-9)))
