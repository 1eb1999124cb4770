"""How long to wait, and how: deadlines, and spinning only where it has paid lately.

Pure but for the clock. Knows no channel.
"""

from __future__ import annotations

import math
import os
import time

MAX_SPIN_S = 20e-6  # an answer that is there sooner needs no sleep; a longer spin keeps busy cores
PROBE_EVERY = 64  # waits; where spinning does not pay, it is tried again so often


class Deadline:
    """A moment by which something must have happened."""

    def __init__(self, seconds: float) -> None:
        """`seconds` from now; raises ValueError where that is no moment."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a deadline in {seconds} s")
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds until then, never below 0."""
        return max(0.0, self._at - time.monotonic())

    def left_ms(self) -> int:
        """As poll(2) wants it: rounded up, so that no wait of its is a spin."""
        return math.ceil(self.left_s() * 1e3)

    @property
    def is_past(self) -> bool:
        return time.monotonic() >= self._at


class Patience:
    """Whether to spin before sleeping: yes while what is waited for comes within the spin.

    Waking a sleeper takes longer than a hop. But a wait for what comes later burns a core for
    nothing, and with one core it keeps the other end from working.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        """`num_cores`: those that this process may use; asked of the system if None."""
        self._can_spin = (num_cores or len(os.sched_getaffinity(0))) > 1
        self._pays = True
        self._num_slept = 0

    def spin_s(self) -> float:
        """How long to spin now."""
        if not self._can_spin:
            return 0.0
        if self._pays or self._num_slept % PROBE_EVERY == PROBE_EVERY - 1:
            return MAX_SPIN_S
        return 0.0

    def waited(self, seconds: float) -> None:
        """Learn from a wait that has ended, whether it was spun or slept."""
        self._pays = seconds <= MAX_SPIN_S
        self._num_slept = 0 if self._pays else self._num_slept + 1
