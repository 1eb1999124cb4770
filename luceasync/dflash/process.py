"""A drafter's process over its lives: used while it is there, started again when it is lost.

Owns the process, and why there is none. Nobody waits for a start but the first: a thread does it.
Knows no pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from luceasync.dflash.spans import LaneSpans
from luceasync.errors import DraftFailed, LuceasyncError, Unavailable
from luceasync.ipc.channel import Started
from luceasync.ipc.supervision import Allowance, Backoff, Course
from luceasync.pipeline.link import Link

log = logging.getLogger(__name__)

T = TypeVar("T")
Advance = Callable[[int], None]

JOIN_S = 30.0
NAME = "the drafter"


class DraftLink(Link):
    """See Link. All methods raise DraftFailed."""

    def __init__(self, started: Started[object]) -> None:
        super().__init__(started, 0)

    def failure(self, words: str) -> LuceasyncError:
        return DraftFailed(f"{words}; {self._started.last_words()}")


@dataclass(slots=True)
class Life:
    """A process that is there, and what is known of it. `num_unsettled`: see
    luceasync.dflash.graph.Runner.
    """

    link: DraftLink
    spans: LaneSpans
    calls: Allowance
    num_unsettled: int = 0


class Start(Protocol):
    """Who starts it; luceasync.dflash.berth.Berth.start is one."""

    def __call__(self, advance: Advance) -> Life:
        """A process that has loaded the drafter; `advance` hears what is read. Raises
        LuceasyncError, and what `advance` raises; the process has ended then.
        """
        ...


class DraftProcess:
    """Engine thread only, but for `off_reason`."""

    def __init__(self, start: Start, backoff: Backoff | None = None) -> None:
        self._start = start
        self._backoff = backoff or Backoff()
        self._life: Life | None = None
        self._fresh: Life | None = None  # started by the thread, and not taken up yet
        self._course = Course()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.num_losses = 0
        self.off_reason: str | None = None  # why there is none; any thread may ask

    def open(self, advance: Advance) -> None:
        """Start it for the first time. Raises as Start does."""
        self._life = self._start(advance)
        self._course = self._course.started(time.monotonic())

    @property
    def life(self) -> Life | None:
        """What is there now."""
        return self._life

    def run(self, work: Callable[[Life], T], otherwise: T) -> T:
        """What comes of `work`, or `otherwise` where nothing is there, or what is there fails."""
        if self._life is None:
            return otherwise
        try:
            return work(self._life)
        except DraftFailed as error:
            self._lose(self._life, error)
            return otherwise

    def rejoin(self) -> None:
        """Take up what the thread has started."""
        if self._life is None and self._fresh is not None:
            self._life, self._fresh = self._fresh, None
            self.off_reason = None
            log.warning("the drafter is there again")

    def probe(self) -> None:
        """Ask for a sign of life."""
        self.rejoin()
        self.run(lambda life: life.link.probe(), None)

    def close(self) -> None:
        """End it. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        for life in (self._life, self._fresh):
            if life is not None:
                life.link.close()
        self._life = self._fresh = None

    def _lose(self, life: Life, error: DraftFailed) -> None:
        self.num_losses += 1
        self._life = None
        self.off_reason = f"{NAME} is gone: {_first_line(error)}"
        log.error("%s is gone, and lanes decode plainly: %s", NAME, error)
        self._course = self._course.failed(time.monotonic(), str(error), self._backoff)
        self._thread = threading.Thread(
            target=self._start_again, args=(life,), name="starts the drafter", daemon=True
        )
        self._thread.start()

    def _start_again(self, lost: Life) -> None:
        """In the thread, until it is there or nobody wants it any more."""
        try:
            lost.link.close()
        except LuceasyncError as error:
            log.error("%s", error)
        while not self._stopping.wait(max(0.0, self._course.not_before_s - time.monotonic())):
            self._course = self._course.started(time.monotonic())
            try:
                self._fresh = self._start(self._advance)
            except Exception as error:
                if self._stopping.is_set():
                    return
                log.error("%s was not started again: %s", NAME, error)
                self._course = self._course.failed(time.monotonic(), str(error), self._backoff)
            else:
                return

    def _advance(self, num_bytes: int) -> None:
        if self._stopping.is_set():
            raise Unavailable("The server is shutting down.")


def _first_line(error: DraftFailed) -> str:
    """What clients are told: no log lines."""
    return str(error).partition("\n")[0].removesuffix("; its last lines:")
