"""The outcomes of file work. Pure values."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from luceasync.errors import CorruptNode, ForeignNode
from luceasync.nodes import MissReason


class WriteOutcome(StrEnum):
    """How a write ended."""

    WRITTEN = "written"
    BUSY = "busy"
    BELOW_FLOOR = "below_floor"
    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Miss:
    """A node that cannot be had; `detail` says what was found and what was expected."""

    reason: MissReason
    detail: str


def is_gone(error: OSError) -> bool:
    """Whether the file was removed, or replaced on another host while it was looked at: a network
    file system tells that as a stale handle. No fault of the disk.
    """
    return error.errno in (errno.ENOENT, errno.ESTALE)


def miss_of(error: CorruptNode | ForeignNode | MemoryError | OSError) -> Miss:
    """The miss for a file that could not be read."""
    if isinstance(error, FileNotFoundError):
        return Miss(MissReason.GONE, "no such file")
    if isinstance(error, MemoryError):
        return Miss(MissReason.NO_MEMORY, str(error) or "out of memory")
    is_fault = isinstance(error, OSError)
    return Miss(MissReason.IO_ERROR if is_fault else MissReason.CORRUPT, str(error))


def outcome_of(error: OSError) -> WriteOutcome:
    """The outcome for a file that could not be written."""
    if isinstance(error, TimeoutError):
        return WriteOutcome.TIMEOUT
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return WriteOutcome.NO_SPACE if is_full else WriteOutcome.IO_ERROR


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of a write. With any outcome but WRITTEN, the file must not be relied on.

    `detail` says what went wrong; with WRITTEN, that a power cut may still lose the file.
    """

    outcome: WriteOutcome
    num_bytes: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """What the tier has done since it was opened."""

    writes: Mapping[WriteOutcome, int]
    bytes_written: int
    reads: int
    hits: int
    misses: Mapping[MissReason, int]
    bytes_read: int
    quarantined: int


Work = Literal["read", "write", "scan", "upkeep"]


class Faults:
    """The last fault of each kind of work that has not succeeded since: success of one kind clears
    no other.
    """

    def __init__(self) -> None:
        self._words: dict[Work, str] = {}
        self._probes: dict[Work, Callable[[], None]] = {}

    def __str__(self) -> str:
        return "; ".join(self._words.values())

    @property
    def probes(self) -> dict[Work, Callable[[], None]]:
        """By kind of work, what shows whether the disk has healed: it raises OSError until then."""
        return {work: self._probes[work] for work in self._words if work in self._probes}

    def tell(self, work: Work, fault: str = "", probe: Callable[[], None] | None = None) -> None:
        """Record how work of a kind ended; an empty fault: it succeeded. `probe`: see probes."""
        self._words.pop(work, None)
        if fault:
            self._words[work] = fault
            if probe is not None:
                self._probes[work] = probe
