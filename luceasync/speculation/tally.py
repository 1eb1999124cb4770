"""What speculation did and what it costs, counted and timed where it happens.

Owns counters and the latest times. Decides nothing; times come from the host's clock, handed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from luceasync.request import Speculation
from luceasync.speculation.adapt import Shape
from luceasync.status import SpeculationStatus

NUM_SAMPLES = 8  # of each kind of step
NUM_MEASURED = 3  # the first is dropped: it may have compiled or captured something
FIRST_WAIT_STEPS = 16  # until it is measured again: the first times may have been bad ones
STALE_STEPS = 1000  # and at most so many, as costs grow with the context


@dataclass(slots=True)
class LaneTally:
    """One choice's speculation."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, shape: Shape, num_accepted: int) -> None:
        self.rounds += 1
        self.proposed += shape.num_rows - 1
        self.accepted += num_accepted

    def told(self, off_reason: str | None) -> Speculation:
        return Speculation(self.rounds, self.proposed, self.accepted, off_reason)


@dataclass(slots=True)
class Totals:
    """All rounds since the start, a tree's rows of one depth counting as one slot.

    By the host's clock, without waiting for a device: `draft_s` until the proposal is queued,
    `verify_s` from there until its logits are on the host, `host_s` what choosing, walking and
    committing take after that. On a CPU these are the parts themselves; on a GPU `verify_s` holds
    the device's time for the proposal too.
    """

    num_slots: int
    rounds: int = 0
    proposed: list[int] = field(init=False)
    accepted: list[int] = field(init=False)
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        self.proposed, self.accepted = [0] * self.num_slots, [0] * self.num_slots

    def add(self, shape: Shape, num_accepted: int) -> None:
        self.rounds += 1
        for slot in range(shape.block - 1):
            self.proposed[slot] += 1
        for slot in range(num_accepted):
            self.accepted[slot] += 1

    def told(self) -> SpeculationStatus:
        return SpeculationStatus(
            self.rounds,
            tuple(self.proposed),
            tuple(self.accepted),
            self.draft_s,
            self.verify_s,
            self.host_s,
        )


class StepCosts:
    """Seconds of steps, by number of lanes and shape: a quarter of the latest were shorter, since a
    step may be held up and is never done too early.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[int, Shape | None], deque[float]] = {}
        self._seconds: dict[Shape | None, dict[int, float]] = {}  # by number of lanes
        self._num_seen: dict[tuple[int, Shape | None], int] = {}
        self._measured_at: dict[tuple[int, Shape | None], int] = {}
        self._num_steps = 0

    def observe(self, num_lanes: int, shape: Shape | None, seconds: float) -> None:
        """Take note of a step that nothing else ran beside; `shape` None: a plain one."""
        key = (num_lanes, shape)
        self._num_steps += 1
        self._measured_at[key] = self._num_steps
        self._num_seen[key] = self.num_seen(num_lanes, shape) + 1
        if self._num_seen[key] > 1:
            samples = self._samples.setdefault(key, deque(maxlen=NUM_SAMPLES))
            samples.append(seconds)
            self._seconds.setdefault(shape, {})[num_lanes] = sorted(samples)[len(samples) // 4]

    def seconds(self, num_lanes: int, shape: Shape | None) -> float | None:
        """See adapt.Costs; the nearest number of lanes stands in for others, larger ones first."""
        known = self._seconds.get(shape)
        if not known:
            return None
        if num_lanes in known:
            return known[num_lanes]
        nearest = min(known, key=lambda lanes: (abs(lanes - num_lanes), -lanes))
        return known[nearest]

    def is_due(self, num_lanes: int, shape: Shape | None) -> bool:
        """Never measured often enough, or long ago; the oftener it was, the longer that takes."""
        num_more = self.num_seen(num_lanes, shape) - NUM_MEASURED
        if num_more < 0:
            return True
        wait_steps: int = min(STALE_STEPS, FIRST_WAIT_STEPS * 4 ** min(num_more, 5))
        return self._num_steps - self._measured_at[num_lanes, shape] > wait_steps

    def num_seen(self, num_lanes: int, shape: Shape | None) -> int:
        """How often it was measured, the first time included."""
        return self._num_seen.get((num_lanes, shape), 0)
