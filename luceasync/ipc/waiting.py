"""How long to wait, and how: deadlines, and spinning only where it has paid lately.

Pure but for the clock. Knows no channel.
"""

from __future__ import annotations

import math
import os
import time

from luceasync.cyext import packets

# Waking a sleeper takes 50 to 200 us, and a step of a model some milliseconds: where cores are
# spare one of them spins from step to step. Of two busy cores, a spin of 20 us doubles a hop.
MAX_SPIN_S = 20e-3
SPARE_CORES = 8
# A core that rests takes longer to wake than a short answer takes to come, and an answer from one
# that has rested takes its wake and cold caches: 60 to 130 us.
BRIEF_SPIN_S = 200e-6
MAX_CREDIT = 3  # spins in a row that may fail: one that comes late now and then ends nothing
PROBE_EVERY = 64  # waits; where spinning does not pay, it is tried again so often


class Deadline:
    """A moment by which something must have happened."""

    __slots__ = ("_begun", "seconds")

    def __init__(self, seconds: float) -> None:
        """`seconds` from now; raises ValueError where that is no moment."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a deadline in {seconds} s")
        self.seconds = seconds
        self._begun = time.monotonic()

    def since_s(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._begun

    def left_ms(self) -> int:
        """As poll(2) wants it: rounded up, so that no wait of its is a spin."""
        return math.ceil(max(0.0, self.seconds - self.since_s()) * 1e3)

    @property
    def is_past(self) -> bool:
        return self.since_s() >= self.seconds


class Patience(packets.Patience):
    """Whether to spin before sleeping: see there. How long is a choice of who waits."""

    @classmethod
    def brief(cls, num_cores: int | None = None) -> Patience:
        """For everybody who has two cores. `num_cores`: that may be used; None: the system says."""
        return cls._of(BRIEF_SPIN_S if _count(num_cores) > 1 else 0.0, trusts_sleep=False)

    @classmethod
    def from_step_to_step(cls, num_cores: int | None = None) -> Patience:
        """For who leaves its cores to nobody, where some are spare."""
        if _count(num_cores) < SPARE_CORES:
            return cls.brief(num_cores)
        return cls._of(MAX_SPIN_S, trusts_sleep=True)

    @classmethod
    def _of(cls, max_s: float, *, trusts_sleep: bool) -> Patience:
        return cls(max_s, trusts_sleep=trusts_sleep, max_credit=MAX_CREDIT, probe_every=PROBE_EVERY)


def _count(num_cores: int | None) -> int:
    return len(os.sched_getaffinity(0)) if num_cores is None else num_cores
