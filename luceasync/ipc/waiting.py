"""How long to wait, and how: deadlines, and spinning only where it has paid lately.

Pure but for the clock. Knows no channel.
"""

from __future__ import annotations

import math
import os
import time

# Waking a sleeper takes 50 to 200 us, and a step of a model some milliseconds: where cores are
# spare one of them spins from step to step. Of two busy cores, a spin of 20 us doubles a hop.
MAX_SPIN_S = 20e-3
SPARE_CORES = 8
# A core that rests takes longer to wake than a short answer takes to come.
BRIEF_SPIN_S = 60e-6
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


class Patience:
    """Whether to spin before sleeping: yes while what is waited for comes within the spin.

    Waking a sleeper takes longer than a hop. But a wait for what comes later burns a core for
    nothing, and where cores are few it keeps the other end from working.
    """

    __slots__ = ("_max_s", "_num_slept", "_trusts_sleep", "spin_s")

    def __init__(self, max_s: float, *, trusts_sleep: bool) -> None:
        """`trusts_sleep`: a wait that was slept for and was short shows that spinning pays again.
        Where cores are busy it does not: the other end may have had this end's core meanwhile.
        """
        self._max_s = max_s
        self._trusts_sleep = trusts_sleep
        self._num_slept = 0
        self.spin_s = max_s  # how long to spin now

    @classmethod
    def brief(cls, num_cores: int | None = None) -> Patience:
        """For everybody who has two cores. `num_cores`: that may be used; None: the system says."""
        return cls(BRIEF_SPIN_S if _count(num_cores) > 1 else 0.0, trusts_sleep=False)

    @classmethod
    def from_step_to_step(cls, num_cores: int | None = None) -> Patience:
        """For who leaves its cores to nobody, where some are spare."""
        if _count(num_cores) < SPARE_CORES:
            return cls.brief(num_cores)
        return cls(MAX_SPIN_S, trusts_sleep=True)

    def waited(self, seconds: float) -> None:
        """Learn from a wait that has ended, whether it was spun or slept."""
        is_short = seconds <= self._max_s
        if is_short and (self.spin_s or self._trusts_sleep):
            self._num_slept = 0
            self.spin_s = self._max_s
        else:
            self._num_slept += 1
            self.spin_s = self._max_s if self._num_slept % PROBE_EVERY == 0 else 0.0


def _count(num_cores: int | None) -> int:
    return len(os.sched_getaffinity(0)) if num_cores is None else num_cores
