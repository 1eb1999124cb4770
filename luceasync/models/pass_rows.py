"""The rows of one forward pass, as the layers of one shard see them.

Owns no tensors of state: it says which lane, which row_indices and which places in the lane's pages.
The same rows are told twice: for the host (entries) and for the device (tensors of fixed shape).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

NO_LANE = -1  # an entry that only fills the batch up to its fixed shape


@dataclass(frozen=True, slots=True)
class Entry:
    """One lane's rows: row_indices `[begin, end)`, which are positions where all chunks are here.

    `write` are the places of these rows in the lane's pages, `read` the places of all row_indices `[0,
    end)`, in order, and for a single row those of the rest of its chunk; a slice where the places
    are consecutive (a view, nothing is copied), else an int64 tensor.
    """

    lane: int
    begin: int
    end: int
    write: slice | Tensor
    read: slice | Tensor


PADDING_ENTRY = Entry(NO_LANE, 0, 0, slice(0, 0), slice(0, 0))


class PastBlocks(Protocol):
    """What one layer keeps of a lane's tokens before the rows of a pass, wherever that is."""

    def blocks(self) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """All of it in order of position: where a block begins, and the layer's rows [tokens, ...]
        in the order in which its kind declares them. Where blocks end does not depend on where
        rows lie. A block holds until the next one is asked for.
        """
        ...

    def probe(self, recent: Tensor, rows: Tensor, begin: int) -> None:
        """The lane's `recent` rows of this layer look at these, whose tokens begin at `begin`. Of
        use where it is to be known which chunks they see; else nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of entries with the same number of rows each.

    `lanes` int32 [entries] (NO_LANE: the entry is padding, its results mean nothing), `row_indices` int32
    [entries, rows]: how many of the lane's rows before this one are here; `tables` int32
    [num_lanes, pages]: of each lane the pages of its resident chunks, in order of chunk.
    `prepared`: by mixer, what its layers need to know of the pass; see MixerBody.prepare. `mark`,
    of a single entry: after how many of its rows what belongs to the lane's end is left with
    NO_LANE too.
    `past`: of a chunk of a prompt, where some of what comes before it is not here: it sees all of
    that, and there is one entry. Each layer has its own.
    """

    entries: tuple[Entry, ...]
    lanes: Tensor
    row_indices: Tensor
    tables: Tensor
    prepared: Mapping[Any, Any]
    mark: int | None = None
    past: PastBlocks | None = None
    num_lanes: int = field(init=False)  # of the entries, the first ones: the others are padding

    def __post_init__(self) -> None:
        num_lanes = sum(entry.lane != NO_LANE for entry in self.entries)
        object.__setattr__(self, "num_lanes", num_lanes)


def with_padding(of_lanes: Tensor, num_entries: int) -> Tensor:
    """[entries, ...]: what was made for the entries that are lanes, then zeros."""
    missing = num_entries - of_lanes.shape[0]
    return F.pad(of_lanes, (0, 0) * (of_lanes.ndim - 1) + (0, missing)) if missing else of_lanes


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """Of entry `entry` of a verify pass the rows `rows`, int64, go to `places` of `lane`, which are
    those of the row_indices from `begin` on.
    """

    entry: int
    lane: int
    begin: int
    places: slice | Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Paths:
    """What is accepted of a verify pass, told twice as Rows are: `kept` for the host, without the
    entries of which nothing is.

    For the device int32: `lanes`, `begins` [entries], the row_indices from which on they are verified,
    `rows` [entries, num_rows] of which the first `counts` [entries] are accepted, and `tables`
    [num_lanes, pages].
    """

    kept: tuple[AcceptedRows, ...]
    lanes: Tensor
    begins: Tensor
    rows: Tensor
    counts: Tensor
    tables: Tensor


def round_up_rows(num_rows: int, *, per_octave: int) -> int:
    """`num_rows`, or as many more as make it one of `per_octave` numbers in each octave, a power of
    two: with 4 of them 8, 10, 12, 14, 16, 20, ... Of the rows less than one part in `per_octave` is
    added.
    """
    step = max(1, (1 << num_rows.bit_length()) // (2 * per_octave))
    return -(-num_rows // step) * step
