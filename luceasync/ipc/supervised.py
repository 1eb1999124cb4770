"""A process that is to run all the time: started, and started again when it has failed.

Owns its course, and the counts of all its lives. Knows no message: what it is told after the
greeting, and when it is of use, is for others to say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from luceasync.errors import ChannelClosed, Unavailable
from luceasync.ipc.channel import Launcher, Started
from luceasync.ipc.handshake import Statement, greet
from luceasync.ipc.pace import LEAST_S, Pace
from luceasync.ipc.packets import Message
from luceasync.ipc.supervision import Backoff, Course
from luceasync.processes import ProcessStatus

END_S = 10.0
START_S = 10.0  # what a start is thought to take before the first one


@dataclass(frozen=True, slots=True)
class Life:
    """One process from its start to its end."""

    started: Started[Any]
    pace: Pace

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
            life = Life(started, Pace(self._least_s))
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
