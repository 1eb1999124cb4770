"""What to do with a process that must run all the time: when to ask it, when to start it again.

Pure: moments are handed in as seconds of any clock that runs evenly. Whoever owns the process acts
on it, and says it to users in these words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next start: twice as long after every failure, up to a limit.

    One that ran for `steady_s` has shown that it can: its failure counts as the first.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    steady_s: float = 60.0

    def delay_s(self, num_failures: int) -> float:
        """After so many failures in a row."""
        if num_failures == 0:
            return 0.0
        doublings = min(num_failures - 1, 64)
        return float(min(self.longest_s, self.first_s * 2**doublings))


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


class Beat(Enum):
    """What a supervisor does next."""

    WAIT = "wait"
    ASK = "ask"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """When to ask an idle process for a sign of life, and when it counts as hung.

    One that works on a call is not asked: the call has a deadline of its own.
    """

    interval_s: float = 1.0
    deadline_s: float = 5.0

    def next(self, now_s: float, heard_s: float, asked_s: float | None) -> Beat:
        """`heard_s`: when it last said anything; `asked_s`: the question that it has not answered
        yet, if there is one.
        """
        if asked_s is not None:
            return Beat.GIVE_UP if now_s >= asked_s + self.deadline_s else Beat.WAIT
        return Beat.ASK if now_s >= heard_s + self.interval_s else Beat.WAIT

    def due_in_s(self, now_s: float, heard_s: float, asked_s: float | None) -> float:
        """How long nothing need be done."""
        at_s = heard_s + self.interval_s if asked_s is None else asked_s + self.deadline_s
        return max(0.0, at_s - now_s)


@dataclass(slots=True)
class Allowance:
    """How long a call may take: many times what such calls have taken so far, at least `least_s`;
    `first_s` before any has been timed.
    """

    least_s: float = 2.0
    first_s: float = 60.0
    times: float = 50.0
    slowest_s: float | None = None

    @property
    def deadline_s(self) -> float:
        if self.slowest_s is None:
            return self.first_s
        return min(self.first_s, max(self.least_s, self.times * self.slowest_s))

    def took(self, seconds: float) -> None:
        """Learn from a call that was answered; what was long ago counts less and less."""
        self.slowest_s = max(seconds, 0.99 * (self.slowest_s or 0.0))
