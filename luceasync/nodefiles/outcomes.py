"""What file work came to: the words for it. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from luceasync.node_words import MissReason


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
