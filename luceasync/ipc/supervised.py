"""A process that is to run all the time: started, and started again when it has failed.

Owns its course, and the counts of all its lives. Knows no message: what it is told after the
greeting, and when it is of use, is for others to say.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from luceasync.errors import ChannelClosed, Unavailable
from luceasync.ipc.channel import Launcher, Started, Statement, greet
from luceasync.ipc.packets import Message
from luceasync.status import ProcessStatus

# How long a call may take: what such calls took before says so. Pure but for the counts. A
# process that has died or hangs is noticed by its signs of life long before; a deadline is for
# one that lives, and does not come to its end.


FIRST_S = 300.0  # of calls whose like has not been seen: kernels may be compiled, graphs captured
NUM_FIRST = 3  # calls that tell nothing of the next one yet
LEAST_S = 30.0
TIMES = 20.0  # as long as the slowest one so far


class CallKind(NamedTuple):
    """What is asked of a process: the kind of work, and on how many rows."""

    verb: str
    num_rows: int = 1


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Calls of one kind and size: how many there were, and what the slowest of them took."""

    num_calls: int = 0
    slowest_s: float = 0.0

    def after(self, seconds: float) -> CallTimes:
        """With one more."""
        return CallTimes(self.num_calls + 1, max(self.slowest_s, seconds))


def deadline_s(seen: CallTimes, least_s: float = LEAST_S) -> float:
    """Of the next one of them. Generous: a loaded machine is slow, and contexts grow."""
    if seen.num_calls < NUM_FIRST:
        return FIRST_S
    return min(FIRST_S, max(least_s, TIMES * seen.slowest_s))


class CallDeadlines:
    """The calls of one process's life. Numbers of rows count as alike up to the next power of 2."""

    def __init__(self, least_s: float = LEAST_S) -> None:
        """`least_s`: shorter where a process that is given up too early costs little."""
        self._least_s = least_s
        self._seen: dict[tuple[str, int], CallTimes] = {}
        self.num_calls = 0
        self.seconds = 0.0

    def deadline_s(self, call: CallKind) -> float:
        """Of the next such call."""
        return deadline_s(self._seen.get(_kind(call), CallTimes()), self._least_s)

    def took(self, call: CallKind, seconds: float) -> None:
        """It was answered after so long."""
        kind = _kind(call)
        self._seen[kind] = self._seen.get(kind, CallTimes()).after(seconds)
        self.num_calls += 1
        self.seconds += seconds


def _kind(call: CallKind) -> tuple[str, int]:
    return call.verb, max(0, call.num_rows - 1).bit_length()


# What to do with a process that must run all the time: when it is hung, when to start it again.
# Pure: moments are handed in as seconds of any clock that runs evenly. Whoever owns the process
# acts on it, and says it to users in these words.


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


END_S = 10.0
START_S = 10.0  # what a start is thought to take before the first one


@dataclass(frozen=True, slots=True)
class Life:
    """One process from its start to its end."""

    started: Started[Any]
    pace: CallDeadlines

    @property
    def is_well(self) -> bool:
        """Whether it lives, as far as is known, and does what it is told. Any thread may ask."""
        return self.started.channel.closed is None and self.started.is_well


class Supervised:
    """One thread starts and fails it; any may look at it."""

    def __init__(
        self,
        launcher: Launcher,
        name: str,
        devices: Sequence[str],
        stopping: threading.Event,
        backoff: Backoff | None = None,
        least_s: float = LEAST_S,
    ) -> None:
        """`name`: for users. `stopping` is set when nobody waits for it any more. `least_s`: see
        Pace.
        """
        self._least_s = least_s
        self._launcher = launcher
        self._name = name
        self._stopping = stopping
        self._backoff = backoff or Backoff()
        self._course = Course()
        # Counts of lives that are over, and the one that is not: they change at once.
        self._lives: tuple[ProcessStatus, Life | None] = (ProcessStatus(name, tuple(devices)), None)
        self._is_of_use = False
        self._start_s = START_S
        self._num_starts = 0

    def wait(self) -> None:
        """Until it may be started again. Raises Unavailable where nobody waits any more."""
        pause_s = max(0.0, self._course.not_before_s - time.monotonic())
        if self._stopping.wait(pause_s):
            raise Unavailable("The server is shutting down.")

    def start(
        self,
        arguments: Sequence[str],
        messages: Sequence[type[Message]],
        statement: Statement,
        deadline_s: float,
    ) -> Life:
        """Another life, after the one before has been ended: it is greeted. Raises ChannelClosed,
        with its last words, and what a launcher raises; it has failed then.
        """
        self.stop()
        self._course = self._course.started(time.monotonic())
        self._num_starts += 1
        try:
            started = self._launcher.launch(arguments, messages)
            life = Life(started, CallDeadlines(self._least_s))
            self._lives = self._lives[0], life
            try:
                greet(started.channel, statement, deadline_s)
            except ChannelClosed as error:
                raise type(error)(f"{error}; {started.last_words()}") from None
        except Exception as error:
            self.failed(str(error))
            self.stop()
            raise
        return life

    def arrived(self) -> None:
        """It is of use from now on."""
        assert self._course.started_s is not None
        self._start_s = time.monotonic() - self._course.started_s
        self._is_of_use = True

    def failed(self, reason: str) -> None:
        """It has died or is not to be believed, or its start has come to nothing. Twice is once."""
        self._is_of_use = False
        if self._course.started_s is not None:
            self._course = self._course.failed(time.monotonic(), reason, self._backoff)

    def stop(self) -> None:
        """End it, which is given no time: it holds nothing that is missed. Idempotent."""
        past, life = self._lives
        self._is_of_use = False
        if life is not None:
            self._lives = _counted(past, life), None
            life.started.end(0.0, END_S)

    @property
    def status(self) -> ProcessStatus:
        """Any thread may ask."""
        past, life = self._lives
        if life is None:
            return replace(past, **self._away(self._course), num_starts=self._num_starts)
        away: dict[str, Any] = {}
        if not self._is_of_use:
            away = self._away(self._course)
        elif not life.is_well:  # nobody has acted on that yet
            away = self._away(
                self._course.failed(time.monotonic(), "it has ended, or hangs", self._backoff)
            )
        vitals = life.started.vitals
        return replace(
            _counted(past, life),
            **away,
            num_starts=self._num_starts,
            heartbeat_age_s=vitals.age_s,
            resident_bytes=vitals.resident_bytes,
        )

    def _away(self, course: Course) -> dict[str, Any]:
        """What is the matter, and when it may be there again."""
        now_s = time.monotonic()
        later_s = course.retry_after_s(now_s, self._start_s)
        return {"detail": course.words(self._name, now_s), "retry_after_s": later_s}


def _counted(past: ProcessStatus, life: Life) -> ProcessStatus:
    """With what a life has counted so far."""
    traffic, pace = life.started.channel.traffic, life.pace
    return replace(
        past,
        calls_total=past.calls_total + pace.num_calls,
        call_s_total=past.call_s_total + pace.seconds,
        sent_bytes_total=past.sent_bytes_total + traffic.num_bytes_sent,
        received_bytes_total=past.received_bytes_total + traffic.num_bytes_received,
    )
