"""What to do with a process that must run all the time: when it is hung, when to start it again.

Pure: moments are handed in as seconds of any clock that runs evenly. Whoever owns the process acts
on it, and says it to users in these words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next start: not at all after a first failure, `second_s` after
    another one, twice as long after every other, up to a limit.

    One that ran for `steady_s` has shown that it can: its failure counts as the first.
    """

    second_s: float = 1.0
    longest_s: float = 60.0
    steady_s: float = 10.0

    def delay_s(self, num_failures: int) -> float:
        """After so many failures in a row."""
        if num_failures < 2:
            return 0.0
        doublings = min(num_failures - 2, 64)
        return float(min(self.longest_s, self.second_s * 2**doublings))


@dataclass(frozen=True, slots=True)
class Course:
    """How the starts of one process have gone. `started_s`: it runs, or is being started, since
    then; None while it is down. `reason` is why it failed last.
    """

    num_failures: int = 0
    not_before_s: float = -math.inf
    started_s: float | None = None
    reason: str = ""

    def may_start(self, now_s: float) -> bool:
        return self.started_s is None and now_s >= self.not_before_s

    def started(self, now_s: float) -> Course:
        """It has been started."""
        return replace(self, started_s=now_s)

    def failed(self, now_s: float, reason: str, backoff: Backoff) -> Course:
        """It has died, or its start has failed."""
        ran_s = 0.0 if self.started_s is None else now_s - self.started_s
        num_failures = 1 if ran_s >= backoff.steady_s else self.num_failures + 1
        return Course(num_failures, now_s + backoff.delay_s(num_failures), None, reason)

    def retry_after_s(self, now_s: float, start_s: float) -> int:
        """When a request may come again, in whole seconds; `start_s`: how long a start takes."""
        if self.started_s is not None:
            left_s = self.started_s + start_s - now_s
        else:
            left_s = max(0.0, self.not_before_s - now_s) + start_s
        return max(1, math.ceil(left_s))

    def words(self, name: str, now_s: float) -> str:
        """For logs, /ready and answers: what is the matter and what will be done."""
        if self.num_failures == 0:
            return f"{name} is being started" if self.started_s is not None else f"{name} is down"
        counted = "" if self.num_failures == 1 else f" (failure {self.num_failures} in a row)"
        if self.started_s is not None:
            return f"{name} failed{counted} and is being started again: {self.reason}"
        left_s = max(0, math.ceil(self.not_before_s - now_s))
        when = "now" if left_s == 0 else f"in {left_s} s"
        return f"{name} failed{counted} and will be started again {when}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How often a process is asked for a sign of life, and after how much silence it is hung."""

    interval_s: float = 1.0
    deadline_s: float = 5.0

    def silent_s(self, before_s: float, passed_s: float) -> float:
        """How long it has been silent, where that was `before_s` when it was asked last. Who asked
        so late has been stopped or starved itself, and the other one with it: that is no silence.
        """
        return before_s + min(passed_s, self.interval_s)

    def is_hung(self, silent_s: float) -> bool:
        return silent_s >= self.deadline_s
