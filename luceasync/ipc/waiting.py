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

    __slots__ = ("_max_s", "_num_slept", "spin_s")

    def __init__(self, num_cores: int | None = None) -> None:
        """`num_cores`: those that this process may use; asked of the system if None."""
        cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
        self._max_s = MAX_SPIN_S if cores >= SPARE_CORES else 0.0
        self._num_slept = 0
        self.spin_s = self._max_s  # how long to spin now

    def waited(self, seconds: float) -> None:
        """Learn from a wait that has ended, whether it was spun or slept."""
        if seconds <= MAX_SPIN_S:
            self._num_slept = 0
            self.spin_s = self._max_s
        else:
            self._num_slept += 1
            self.spin_s = self._max_s if self._num_slept % PROBE_EVERY == 0 else 0.0
