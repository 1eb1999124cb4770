"""A drafter's process over its lives: used while it is there, started again when it is lost.

Owns whether there is one, and why there is none. Nobody waits for a start but the first: a thread
does it. Knows no pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from luceasync.dflash.spans import LaneSpans
from luceasync.errors import DraftFailed, LuceasyncError
from luceasync.ipc.supervised import Life, Supervised
from luceasync.pipeline.link import Link

log = logging.getLogger(__name__)

T = TypeVar("T")
Advance = Callable[[int], None]

JOIN_S = 30.0
NAME = "the drafter"


class DraftLink(Link):
    """See Link. All methods raise DraftFailed."""

    def __init__(self, life: Life) -> None:
        super().__init__(life, 0)

    def failure(self, words: str) -> LuceasyncError:
        return DraftFailed(f"{words}; {self._started.last_words()}")


@dataclass(slots=True)
class Loaded:
    """A process that has loaded the drafter, and what is known of it. `num_unsettled`: see
    luceasync.dflash.graph.Runner.
    """

    link: DraftLink
    spans: LaneSpans
    num_unsettled: int = 0


class Start(Protocol):
    """Who has one loaded; luceasync.dflash.berth.Berth.start is one."""

    def __call__(self, process: Supervised, advance: Advance) -> Loaded:
        """Another life of it; `advance` hears what is read. Raises LuceasyncError, and what
        `advance` raises; the process has ended then.
        """
        ...


class DraftProcess:
    """Engine thread only, but for `off_reason`."""

    def __init__(self, process: Supervised, start: Start, stopping: threading.Event) -> None:
        """`process` waits for `stopping`, which is set here at the end."""
        self._process = process
        self._start = start
        self._stopping = stopping
        self._fresh: Loaded | None = None  # started by the thread, and not taken up yet
        self._thread: threading.Thread | None = None
        self.loaded: Loaded | None = None  # what is there now
        self.off_reason: str | None = None  # why there is none; any thread may ask

    def open(self, advance: Advance) -> None:
        """Start it for the first time. Raises as Start does."""
        self.loaded = self._start(self._process, advance)

    def run(self, work: Callable[[Loaded], T], otherwise: T) -> T:
        """What comes of `work`, or `otherwise` where nothing is there, or what is there fails."""
        if self.loaded is None:
            return otherwise
        try:
            return work(self.loaded)
        except DraftFailed as error:
            self._lose(error)
            return otherwise

    def notice(self) -> None:
        """Let go of one that is known to be gone, and take up one that is there again."""
        self.run(lambda loaded: loaded.link.notice(), None)
        if self.loaded is None and self._fresh is not None:
            self.loaded, self._fresh = self._fresh, None
            self.off_reason = None
            log.warning("%s is there again", NAME)

    def probe(self) -> None:
        """Ask for a sign of life."""
        self.notice()
        self.run(lambda loaded: loaded.link.probe(), None)

    def close(self) -> None:
        """End it. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self.loaded = self._fresh = None
        self._process.stop()

    def _lose(self, error: DraftFailed) -> None:
        self.loaded = None
        self.off_reason = f"{NAME} is gone: {_without_lines(error)}"
        log.error("%s is gone, and lanes decode plainly: %s", NAME, error)
        self._process.failed(str(error))
        name = f"starts {NAME}"
        self._thread = threading.Thread(target=self._start_again, name=name, daemon=True)
        self._thread.start()

    def _start_again(self) -> None:
        """In the thread, until it is there or nobody wants it any more."""
        while not self._stopping.is_set():
            try:
                self._process.stop()
                self._process.wait()
                self._fresh = self._start(self._process, self._advance)
            except Exception as error:
                if not self._stopping.is_set():
                    log.error("%s was not started again: %s", NAME, error)
            else:
                return

    def _advance(self, num_bytes: int) -> None:
        if self._stopping.is_set():
            raise DraftFailed("nobody waits for it any more")


def _without_lines(error: DraftFailed) -> str:
    """What clients are told: no log lines."""
    return str(error).partition("\n")[0].removesuffix("; its last lines:")
