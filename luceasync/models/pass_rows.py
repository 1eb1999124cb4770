"""The rows of one forward pass, as the layers of one shard see them.

Owns no state: describes lanes, row indices and places in the lanes' pages. Everything is given
twice, for the host (entries) and for the device (tensors of fixed shape).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

NO_LANE = -1  # a padding entry of a batch of fixed shape


@dataclass(frozen=True, slots=True)
class Entry:
    """One lane's rows: row indices `[begin, end)`, which equal positions if no chunk is absent.

    `write`: places of these rows in the lane's pages. `read`: places of all rows `[0, end)` in
    order, and for a single row those of the rest of its chunk. Each is a slice if the places are
    consecutive (a view, no copy), otherwise an int64 tensor.
    """

    lane: int
    begin: int
    end: int
    write: slice | Tensor
    read: slice | Tensor


PADDING_ENTRY = Entry(NO_LANE, 0, 0, slice(0, 0), slice(0, 0))


class PastBlocks(Protocol):
    """One layer's rows of a lane's tokens before those of a pass, on the device or in host
    memory."""

    def blocks(self) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield all of them in order of position: where a block begins, and the layer's rows
        [tokens, ...] in the order in which its kind declares them. Where blocks end does not depend
        on where rows lie. A block is valid until the next one is taken.
        """
        ...

    def probe(self, recent: Tensor, rows: Tensor, begin: int) -> None:
        """Let the lane's `recent` rows of this layer score these rows, whose tokens begin at
        `begin`. Does nothing unless the pass probes.
        """
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of entries with the same number of rows each.

    - `lanes`: int32 [entries]; NO_LANE for padding, whose results mean nothing.
    - `row_indices`: int32 [entries, rows], the number of the lane's resident rows before each row.
    - `tables`: int32 [num_lanes, pages], the pages of each lane's resident chunks in order.
    - `prepared`: by mixer, the result of MixerBody.prepare.
    - `mark`: of a single entry, the number of its rows after which the lane's end state is also
      copied to NO_LANE.
    - `past`: set for a prefill chunk with absent rows before it, which attends to all of `past`. It
      has one entry, and each layer has its own `past`.
    """

    entries: tuple[Entry, ...]
    lanes: Tensor
    row_indices: Tensor
    tables: Tensor
    prepared: Mapping[Any, Any]
    mark: int | None = None
    past: PastBlocks | None = None
    num_lanes: int = field(init=False)  # entries that are lanes; they come first

    def __post_init__(self) -> None:
        num_lanes = sum(entry.lane != NO_LANE for entry in self.entries)
        object.__setattr__(self, "num_lanes", num_lanes)


@dataclass(frozen=True, slots=True)
class LentKeys:
    """A layer's keys and values of a pass, as projected, [entries, rows, 2 kv_heads * head_dim],
    and the norm of its keys, float32 [head_dim].
    """

    columns: Tensor
    norm: Tensor


@dataclass(slots=True)
class Handed:
    """What the ends and earlier layers of a shard leave for later layers of the same pass. A shard
    runs one pass at a time, and each part is written before it is read.

    - `inputs`: [entries, rows, layers, numbers], for each layer of its own.
    - `keys`: by the window of layers that borrow them.
    - `places`: of the layer that lends keys of all tokens, its state, earlier rows and scratch.
    """

    inputs: Tensor | None = None
    keys: dict[int, LentKeys] = field(default_factory=dict)
    places: tuple[tuple[Tensor, ...], PastBlocks | None, tuple[Tensor, ...]] | None = None


def with_padding(of_lanes: Tensor, num_entries: int) -> Tensor:
    """Append zeros for padding entries: [lanes, ...] -> [entries, ...]."""
    missing = num_entries - of_lanes.shape[0]
    return F.pad(of_lanes, (0, 0) * (of_lanes.ndim - 1) + (0, missing)) if missing else of_lanes


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """Rows of a verify pass to keep: `rows` int64 of entry `entry` go to `places` of `lane`, which
    belong to row indices from `begin` on. The first of them is at `position` in the text."""

    entry: int
    lane: int
    begin: int
    position: int
    places: slice | Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Paths:
    """The accepted rows of a verify pass. `kept`: for the host, without entries that keep nothing.

    For the device, int32: `lanes`, and `begins` and `positions` [entries], the row index and the
    position of each entry's first row; `rows` [entries, num_rows], of which the first `counts`
    [entries] are accepted; `tables` [num_lanes, pages].
    """

    kept: tuple[AcceptedRows, ...]
    lanes: Tensor
    begins: Tensor
    positions: Tensor
    rows: Tensor
    counts: Tensor
    tables: Tensor


def round_up_rows(num_rows: int, *, per_octave: int) -> int:
    """Round up to one of `per_octave` numbers in each octave, a power of two: with 4 of them to 8,
    10, 12, 14, 16, 20, ... Adds less than one part in `per_octave`.
    """
    step = max(1, (1 << num_rows.bit_length()) // (2 * per_octave))
    return -(-num_rows // step) * step
