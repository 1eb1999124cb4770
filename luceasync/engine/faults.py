"""What a failure means: for those who were served when it came, and for the engine.

Pure, but for the counts of failures and of restarts. Knows neither threads nor lanes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from luceasync.errors import StageFailed
from luceasync.request import ErrorKind

# A pass of one of the two kinds, a step's work around passes, or what was asked from outside.
During = Literal["prefill", "decode", "between", "command"]

MAX_IN_A_ROW = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before the engine is made anew
SOUND_LIFE_S = 60.0  # after which a failure counts as the first one


@dataclass(frozen=True, slots=True)
class Fault:
    """What clients are told of an exception, and what the engine was doing when it was raised."""

    words: str
    kind: ErrorKind
    during: During


def fault_of(error: Exception, during: During) -> Fault:
    """A stage that failed is nobody's fault and may come back; all else is a fault of ours."""
    if isinstance(error, StageFailed):
        return Fault(str(error), "unavailable", during)
    return Fault(f"the engine failed: {type(error).__name__}: {error}", "failed", during)


class Failures:
    """Failures in a row: of passes of a kind without one that was completed between them, and of
    what happens outside of passes without any pass between.

    One kind does not excuse the other: an engine that prefills but cannot decode is of no use.
    """

    def __init__(self) -> None:
        self._in_a_row: Counter[During] = Counter()
        self._completed: dict[During, int] = {}  # when it failed last

    def is_last(self, during: During, num_completed: int) -> bool:
        """Count a failure. Whether the engine is to give up; `num_completed`: passes since the
        start that would show that it had recovered.
        """
        if self._completed.get(during) != num_completed:
            self._in_a_row[during] = 0
        self._completed[during] = num_completed
        self._in_a_row[during] += 1
        return self._in_a_row[during] >= MAX_IN_A_ROW


class Restarts:
    """How long to wait before the engine is made anew: longer each time that it did not last."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def pause_s(self, lived_s: float) -> float:
        """Seconds to wait now; the life that has ended took `lived_s`, 0 where there was none."""
        if lived_s >= SOUND_LIFE_S:
            self._next_s = FIRST_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_PAUSE_S)
        return pause_s
