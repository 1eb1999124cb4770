"""How many choices are in the engine, whose they are, and who is refused because there are too
many.

Owns the counts and how long a choice takes on average. Knows neither lanes nor streams.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from luceasync.engine.fairness import may_enter
from luceasync.errors import QueueFull
from luceasync.request import Timings


@dataclass(frozen=True, slots=True)
class Room:
    """How many choices may be in the engine, and after how long whoever finds no place may come
    back.
    """

    num_places: int
    retry_after_s: int


class Admission:
    """`num_lanes` choices run, `max_queue` more may wait; event loop only."""

    def __init__(self, num_lanes: int, max_queue: int) -> None:
        self._num_lanes = num_lanes
        self._max_queue = max_queue
        self._num_held = Counter[str]()  # by client: choices submitted that have not finished
        self._mean_choice_s = 1.0

    def __repr__(self) -> str:
        return f"Admission({self._num_held.total()} of {self._num_lanes} + {self._max_queue})"

    @property
    def room(self) -> Room:
        """What there is for all clients together."""
        wait_s = retry_after_s(self._num_lanes, self._mean_choice_s)
        return Room(self._num_lanes + self._max_queue, wait_s)

    def check(self, num_choices: int, client: str = "") -> None:
        """Raise QueueFull unless there is a place for each, or a client that holds more has to make
        room for them.
        """
        room = self.room
        if not may_enter(self._num_held, room.num_places, client, num_choices):
            num_queued = max(0, self._num_held.total() - self._num_lanes)
            raise QueueFull(num_queued, room.retry_after_s)

    def enter(self, num_choices: int, client: str = "") -> None:
        """So many more are submitted."""
        self._num_held[client] += num_choices

    def leave(self, timings: Timings, client: str = "") -> None:
        """One has finished."""
        self._num_held[client] -= 1
        if not self._num_held[client]:
            del self._num_held[client]
        seconds = timings.prefill_s + timings.decode_s
        self._mean_choice_s += 0.1 * (seconds - self._mean_choice_s)


def retry_after_s(num_lanes: int, mean_choice_s: float) -> int:
    """Seconds until a lane, and with it a place in the queue, is likely to be free: 1 to 60."""
    return max(1, min(60, round(mean_choice_s / num_lanes)))
