"""How many choices are in the engine, whose they are, and who is refused because there are too
many.

Owns the counts, and tells the pace at which choices end. Knows neither lanes nor streams.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from luceasync.engine.scheduler import may_enter
from luceasync.errors import QueueFull

# How fast places become free where all lanes are taken, and when whoever found none may come
# back. Owns the measured rate. Knows neither clients nor queues; times come in as arguments.


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


@dataclass(frozen=True, slots=True)
class Room:
    """How many choices may be in the engine, and after how long whoever finds no place may come
    back.
    """

    num_places: int
    retry_after_s: int


class Admission:
    """`num_lanes` choices run, `max_queue` more may wait; event loop only."""

    def __init__(
        self, num_lanes: int, max_queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_lanes = num_lanes
        self._max_queue = max_queue
        self._num_held = Counter[str]()  # by client: choices submitted that have not finished
        self._clock = clock
        self._pace = Pace()

    def __repr__(self) -> str:
        return f"Admission({self._num_held.total()} of {self._num_lanes} + {self._max_queue})"

    @property
    def room(self) -> Room:
        """What there is for all clients together."""
        return Room(self._num_lanes + self._max_queue, self._pace.wait_s(self._clock()))

    def check(self, num_choices: int, client: str = "") -> None:
        """Raise QueueFull unless there is a place for each, or a client that holds more has to make
        room for them.
        """
        num_places = self._num_lanes + self._max_queue
        if not may_enter(self._num_held, num_places, client, num_choices):
            num_held = self._num_held.total()
            num_missing = max(1, num_held + num_choices - num_places)
            wait_s = self._pace.wait_s(self._clock(), num_missing)
            self._pace.told(num_missing)
            raise QueueFull(max(0, num_held - self._num_lanes), wait_s)

    def enter(self, num_choices: int, client: str = "") -> None:
        """So many more are submitted."""
        self._num_held[client] += num_choices
        if self._is_full:
            self._pace.filled(self._clock())

    def leave(self, client: str = "") -> None:
        """One has finished."""
        self._num_held[client] -= 1
        if not self._num_held[client]:
            del self._num_held[client]
        self._pace.ended(self._clock(), is_full=self._is_full)

    @property
    def _is_full(self) -> bool:
        return self._num_held.total() >= self._num_lanes
