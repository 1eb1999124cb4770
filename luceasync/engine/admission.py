"""How many choices are in the engine, whose they are, and who is refused because there are too
many.

Owns the counts, and tells the pace at which choices end. Knows neither lanes nor streams.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from luceasync.engine.fairness import may_enter
from luceasync.engine.pace import Pace
from luceasync.errors import QueueFull


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
