"""What file work came to: the words for it. Pure values."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from luceasync.errors import CorruptNode, ForeignNode
from luceasync.nodes import MissReason


class WriteOutcome(StrEnum):
    """What became of a write."""

    WRITTEN = "written"
    BUSY = "busy"
    BELOW_FLOOR = "below_floor"
    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Miss:
    """A node that is not to be had; `detail` says what came and what was expected."""

    reason: MissReason
    detail: str


def miss_of(error: CorruptNode | ForeignNode | MemoryError | OSError) -> Miss:
    """What a file that could not be read comes to."""
    if isinstance(error, FileNotFoundError):
        return Miss(MissReason.GONE, "no such file")
    if isinstance(error, MemoryError):
        return Miss(MissReason.NO_MEMORY, str(error) or "out of memory")
    is_fault = isinstance(error, OSError)
    return Miss(MissReason.IO_ERROR if is_fault else MissReason.CORRUPT, str(error))


def outcome_of(error: OSError) -> WriteOutcome:
    """What a file that could not be written comes to."""
    if isinstance(error, TimeoutError):
        return WriteOutcome.TIMEOUT
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return WriteOutcome.NO_SPACE if is_full else WriteOutcome.IO_ERROR


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a write came to. Under any outcome but WRITTEN the node is not to be counted on.

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


# What is wrong with a disk, by the kind of work that fails: one that succeeds excuses no other.
# Owns the words of the last faults. Pure.


Work = Literal["read", "write", "scan", "upkeep"]


class Faults:
    """The faults of work that has not succeeded since."""

    def __init__(self) -> None:
        self._words: dict[Work, str] = {}

    def __str__(self) -> str:
        return "; ".join(self._words.values())

    def tell(self, work: Work, fault: str = "") -> None:
        """What became of the last work of a kind; empty: it succeeded."""
        self._words.pop(work, None)
        if fault:
            self._words[work] = fault
