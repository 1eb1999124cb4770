"""How long a call may take: what such calls took before says so.

Pure but for the counts. A process that has died or hangs is noticed by its signs of life long
before; a deadline is for one that lives, and does not come to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FIRST_S = 300.0  # of calls whose like has not been seen: kernels may be compiled, graphs captured
NUM_FIRST = 3  # calls that tell nothing of the next one yet
LEAST_S = 30.0
TIMES = 20.0  # as long as the slowest one so far


class Call(NamedTuple):
    """What is asked of a process: the kind of work, and on how many rows."""

    verb: str
    num_rows: int = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """Calls of one kind and size: how many there were, and what the slowest of them took."""

    num_calls: int = 0
    slowest_s: float = 0.0

    def after(self, seconds: float) -> Seen:
        """With one more."""
        return Seen(self.num_calls + 1, max(self.slowest_s, seconds))


def deadline_s(seen: Seen, least_s: float = LEAST_S) -> float:
    """Of the next one of them. Generous: a loaded machine is slow, and contexts grow."""
    if seen.num_calls < NUM_FIRST:
        return FIRST_S
    return min(FIRST_S, max(least_s, TIMES * seen.slowest_s))


class Pace:
    """The calls of one process's life. Numbers of rows count as alike up to the next power of 2."""

    def __init__(self, least_s: float = LEAST_S) -> None:
        """`least_s`: shorter where a process that is given up too early costs little."""
        self._least_s = least_s
        self._seen: dict[tuple[str, int], Seen] = {}
        self.num_calls = 0
        self.seconds = 0.0

    def deadline_s(self, call: Call) -> float:
        """Of the next such call."""
        return deadline_s(self._seen.get(_kind(call), Seen()), self._least_s)

    def took(self, call: Call, seconds: float) -> None:
        """It was answered after so long."""
        kind = _kind(call)
        self._seen[kind] = self._seen.get(kind, Seen()).after(seconds)
        self.num_calls += 1
        self.seconds += seconds


def _kind(call: Call) -> tuple[str, int]:
    return call.verb, max(0, call.num_rows - 1).bit_length()
