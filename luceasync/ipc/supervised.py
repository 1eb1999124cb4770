"""A process that must always run: started, and restarted after a failure.

Decides when it may be restarted and how long calls may take, and counts over all its lives. Does
not know messages: users decide what is sent after the greeting, and when the process is ready.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from luceasync.errors import ChannelClosed, Unavailable
from luceasync.ipc.channel import Launcher, StartedProcess, Statement, greet
from luceasync.ipc.packets import Message
from luceasync.status import ProcessStatus

# A deadline is for a process that lives and does not finish a call. The heartbeat notices a process
# that has died or hangs long before.
FIRST_S = 300.0  # of the first calls of a kind: kernels may be compiled, graphs captured
NUM_FIRST = 3  # calls that do not predict the next one yet
LEAST_S = 30.0
TIMES = 20.0  # times the slowest call so far


class CallKind(NamedTuple):
    """A kind of work that a process does, and on how many rows."""

    verb: str
    num_rows: int = 1


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Calls of one kind and size: how many there were, and how long the slowest took."""

    num_calls: int = 0
    slowest_s: float = 0.0

    def after(self, seconds: float) -> CallTimes:
        """The same with one more call."""
        return CallTimes(self.num_calls + 1, max(self.slowest_s, seconds))


def deadline_s(seen: CallTimes, least_s: float = LEAST_S) -> float:
    """The deadline of the next call. Generous: a loaded machine is slow, and contexts grow."""
    if seen.num_calls < NUM_FIRST:
        return FIRST_S
    return min(FIRST_S, max(least_s, TIMES * seen.slowest_s))


class CallDeadlines:
    """Deadlines of the calls in one life of a process, from how long such calls took so far.
    Numbers of rows are grouped by the next power of 2."""

    def __init__(self, least_s: float = LEAST_S) -> None:
        """`least_s`: shorter if it costs little to give up on a process too early."""
        self._least_s = least_s
        self._seen: dict[tuple[str, int], CallTimes] = {}
        self.num_calls = 0
        self.seconds = 0.0

    def deadline_s(self, call: CallKind) -> float:
        """The deadline of the next call of this kind."""
        return deadline_s(self._seen.get(_kind(call), CallTimes()), self._least_s)

    def took(self, call: CallKind, seconds: float) -> None:
        """Count a call that took this many seconds."""
        kind = _kind(call)
        self._seen[kind] = self._seen.get(kind, CallTimes()).after(seconds)
        self.num_calls += 1
        self.seconds += seconds


def _kind(call: CallKind) -> tuple[str, int]:
    return call.verb, max(0, call.num_rows - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next start: not at all after the first failure, `second_s` after
    the second, and twice as long after each further one, up to a limit. The failure of a process
    that ran for `steady_s` counts as the first."""

    second_s: float = 1.0
    longest_s: float = 60.0
    steady_s: float = 10.0

    def delay_s(self, num_failures: int) -> float:
        """The delay after this many failures in a row."""
        if num_failures < 2:
            return 0.0
        doublings = min(num_failures - 2, 64)
        return float(min(self.longest_s, self.second_s * 2**doublings))


@dataclass(frozen=True, slots=True)
class StartHistory:
    """The starts of one process; pure, with times of any monotonic clock. `started_s`: when it
    started, or began to start; None while it is down. `reason`: of the last failure."""

    num_failures: int = 0
    not_before_s: float = -math.inf
    started_s: float | None = None
    reason: str = ""

    def may_start(self, now_s: float) -> bool:
        return self.started_s is None and now_s >= self.not_before_s

    def started(self, now_s: float) -> StartHistory:
        """The history after a start."""
        return replace(self, started_s=now_s)

    def failed(self, now_s: float, reason: str, backoff: Backoff) -> StartHistory:
        """The history after a death, or a failed start."""
        ran_s = 0.0 if self.started_s is None else now_s - self.started_s
        num_failures = 1 if ran_s >= backoff.steady_s else self.num_failures + 1
        return StartHistory(num_failures, now_s + backoff.delay_s(num_failures), None, reason)

    def retry_after_s(self, now_s: float, start_s: float) -> int:
        """Whole seconds after which to retry a request; `start_s`: how long a start takes."""
        if self.started_s is not None:
            left_s = self.started_s + start_s - now_s
        else:
            left_s = max(0.0, self.not_before_s - now_s) + start_s
        return max(1, math.ceil(left_s))

    def words(self, name: str, now_s: float) -> str:
        """For logs, /ready and answers: what is wrong, and what happens next."""
        if self.num_failures == 0:
            return f"{name} is being started" if self.started_s is not None else f"{name} is down"
        counted = "" if self.num_failures == 1 else f" (failure {self.num_failures} in a row)"
        if self.started_s is not None:
            return f"{name} failed{counted} and is being restarted: {self.reason}"
        left_s = max(0, math.ceil(self.not_before_s - now_s))
        when = "now" if left_s == 0 else f"in {left_s} s"
        return f"{name} failed{counted} and will be restarted {when}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How often to send a heartbeat, and after how much silence a process counts as hung."""

    interval_s: float = 1.0
    deadline_s: float = 5.0

    def silent_s(self, before_s: float, passed_s: float) -> float:
        """How long the process has been silent, if that was `before_s` at the previous heartbeat.
        An interval that ended late does not count in full: this process was stopped or starved, and
        most likely the other one too."""
        return before_s + min(passed_s, self.interval_s)

    def is_hung(self, silent_s: float) -> bool:
        return silent_s >= self.deadline_s


END_S = 10.0
START_S = 10.0  # assumed duration of a start, before the first one


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """One process from its start to its end."""

    started: StartedProcess[Any]
    deadlines: CallDeadlines

    @property
    def is_well(self) -> bool:
        """Whether it runs and answers, as far as is known. May be called from any thread."""
        return self.started.channel.closed is None and self.started.is_well


class SupervisedProcess:
    """One thread starts it and reports failures; any thread may read its status."""

    def __init__(
        self,
        launcher: Launcher,
        name: str,
        devices: Sequence[str],
        stopping: threading.Event,
        backoff: Backoff | None = None,
        least_s: float = LEAST_S,
    ) -> None:
        """`name`: shown to users. `stopping` is set once restarts are no longer wanted. `least_s`:
        see CallDeadlines."""
        self._least_s = least_s
        self._launcher = launcher
        self._name = name
        self._stopping = stopping
        self._backoff = backoff or Backoff()
        self._history = StartHistory()
        # Counts of past lives, and the present one: replaced together, since any thread reads them.
        self._lives: tuple[ProcessStatus, ProcessLife | None] = (
            ProcessStatus(name, tuple(devices)),
            None,
        )
        self._is_of_use = False
        self._start_s = START_S
        self._num_starts = 0

    def wait(self) -> None:
        """Wait until it may be restarted. Raises Unavailable if restarts are no longer wanted."""
        pause_s = max(0.0, self._history.not_before_s - time.monotonic())
        if self._stopping.wait(pause_s):
            raise Unavailable("The server is shutting down.")

    def start(
        self,
        arguments: Sequence[str],
        messages: Sequence[type[Message]],
        statement: Statement,
        deadline_s: float,
    ) -> ProcessLife:
        """End the present life, start another and greet it. Raises ChannelClosed, with the last
        lines of the process, and the launcher's errors; each counts as a failure."""
        self.stop()
        self._history = self._history.started(time.monotonic())
        self._num_starts += 1
        try:
            started = self._launcher.launch(arguments, messages)
            life = ProcessLife(started, CallDeadlines(self._least_s))
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
        """Record that it is ready."""
        assert self._history.started_s is not None
        self._start_s = time.monotonic() - self._history.started_s
        self._is_of_use = True

    def failed(self, reason: str) -> None:
        """Record that it died, cannot be trusted, or did not start. Idempotent until a start."""
        self._is_of_use = False
        if self._history.started_s is not None:
            self._history = self._history.failed(time.monotonic(), reason, self._backoff)

    def stop(self) -> None:
        """Kill it: nothing that it holds is needed. Idempotent."""
        past, life = self._lives
        self._is_of_use = False
        if life is not None:
            self._lives = _counted(past, life), None
            life.started.end(0.0, END_S)

    @property
    def status(self) -> ProcessStatus:
        """May be called from any thread."""
        past, life = self._lives
        if life is None:
            return replace(past, **self._away(self._history), num_starts=self._num_starts)
        away: dict[str, Any] = {}
        if not self._is_of_use:
            away = self._away(self._history)
        elif not life.is_well:  # the SupervisedProcess has not been notified yet
            away = self._away(
                self._history.failed(time.monotonic(), "it has ended, or hangs", self._backoff)
            )
        vitals = life.started.vitals
        return replace(
            _counted(past, life),
            **away,
            num_starts=self._num_starts,
            heartbeat_age_s=vitals.age_s,
            resident_bytes=vitals.resident_bytes,
        )

    def _away(self, course: StartHistory) -> dict[str, Any]:
        """What is wrong, and when it may be back."""
        now_s = time.monotonic()
        later_s = course.retry_after_s(now_s, self._start_s)
        return {"detail": course.words(self._name, now_s), "retry_after_s": later_s}


def _counted(past: ProcessStatus, life: ProcessLife) -> ProcessStatus:
    """The counts, with those of the current life so far."""
    traffic, deadlines = life.started.channel.traffic, life.deadlines
    return replace(
        past,
        calls_total=past.calls_total + deadlines.num_calls,
        call_s_total=past.call_s_total + deadlines.seconds,
        sent_bytes_total=past.sent_bytes_total + traffic.num_bytes_sent,
        received_bytes_total=past.received_bytes_total + traffic.num_bytes_received,
    )
