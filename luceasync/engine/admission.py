"""How many choices are in the engine, and who is refused because there are too many.

Owns the count and how long a choice takes on average. Knows neither lanes nor streams.
"""

from __future__ import annotations

from luceasync.errors import QueueFull
from luceasync.request import Timings


class Admission:
    """`num_lanes` choices run, `max_queue` more may wait; event loop only."""

    def __init__(self, num_lanes: int, max_queue: int) -> None:
        self._num_lanes = num_lanes
        self._max_queue = max_queue
        self._num_admitted = 0  # choices that were submitted and have not finished
        self._mean_choice_s = 1.0

    def __repr__(self) -> str:
        return f"Admission({self._num_admitted} of {self._num_lanes} + {self._max_queue})"

    def check(self, num_choices: int) -> None:
        """Raise QueueFull unless there is a place for each."""
        if self._num_admitted + num_choices > self._num_lanes + self._max_queue:
            num_queued = max(0, self._num_admitted - self._num_lanes)
            raise QueueFull(num_queued, retry_after_s(self._num_lanes, self._mean_choice_s))

    def enter(self, num_choices: int) -> None:
        """So many more are submitted."""
        self._num_admitted += num_choices

    def leave(self, timings: Timings) -> None:
        """One has finished."""
        self._num_admitted -= 1
        seconds = timings.prefill_s + timings.decode_s
        self._mean_choice_s += 0.1 * (seconds - self._mean_choice_s)


def retry_after_s(num_lanes: int, mean_choice_s: float) -> int:
    """Seconds until a lane, and with it a place in the queue, is likely to be free: 1 to 60."""
    return max(1, min(60, round(mean_choice_s / num_lanes)))
