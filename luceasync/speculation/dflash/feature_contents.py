"""Rows of features that lanes have left behind: what nodes hold of them, without their names.

Owns where they lie. Knows no tree, and not which of them a prefix needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copy_stream import copy_beside
from luceasync.speculation.dflash.features import FLOATS, FeatureRing, FeatureSpec

C = TypeVar("C")


class Part(NamedTuple, Generic[C]):
    """Rows `[begin, end)` of a content."""

    content: C
    begin: int
    end: int


class FeatureContents(Protocol[C]):
    """Rows outside of lanes, wherever drafter and memory are. Engine thread only."""

    spec: FeatureSpec
    capacity_tokens: int  # of a lane
    row_bytes: int

    def held(self, lane: int, begin: int, end: int) -> range:
        """See LaneSpans."""
        ...

    def take_out(self, lane: int, begin: int, end: int) -> C:
        """Copy the lane's rows of positions `[begin, end)`, which it holds. Raises MemoryError."""
        ...

    def put_in(self, lane: int, begin: int, parts: Sequence[Part[C]]) -> None:
        """The lane has these rows, one part after the other, of positions from `begin` on, and no
        others.
        """
        ...

    def is_there(self, content: C) -> bool:
        """Whether it can still be had: a process that has ended may have taken it along."""
        ...

    def rows(self, content: C) -> Tensor | None:
        """The rows, [tokens, taps * hidden] on the host, not to be changed; None: they are gone."""
        ...

    def given(self, rows: Tensor) -> C:
        """A content of rows on the host, [tokens, taps * hidden] of a dtype of FLOATS. Raises
        MemoryError where they are copied.
        """
        ...

    def let_go(self, content: C) -> None:
        """Forget it."""
        ...


class Lanes(Protocol):
    """Whose rows they are; luceasync.speculation.dflash.passes.LocalDraft is one."""

    @property
    def ring(self) -> FeatureRing: ...

    def restore(self, lane: int, begin: int, rows: Tensor) -> None: ...


class LocalFeatures:
    """See FeatureContents: of a drafter in this process, in memory for nodes."""

    def __init__(self, lanes: Lanes, memory: HostMemory) -> None:
        ring = lanes.ring
        self.spec, self.capacity_tokens = ring.spec, ring.capacity_tokens
        self.row_bytes = ring.spec.width * ring.store.element_size()
        self._lanes = lanes
        self._ring = ring
        self._memory = memory

    def held(self, lane: int, begin: int, end: int) -> range:
        return self._ring.held(lane, begin, end)

    @torch.inference_mode()
    def take_out(self, lane: int, begin: int, end: int) -> Tensor:
        rows = self._ring.rows(lane, begin, end)
        source = rows.reshape(-1).view(torch.uint8)
        host = torch.frombuffer(self._memory.allocate(source.numel()), dtype=torch.uint8)
        copy_beside([(host, source)])
        self._ring.platform.synchronize()
        return host.view(rows.dtype).view(rows.shape)

    @torch.inference_mode()
    def put_in(self, lane: int, begin: int, parts: Sequence[Part[Tensor]]) -> None:
        rows = [part.content[part.begin : part.end] for part in parts]
        self._lanes.restore(lane, begin, torch.cat(rows))

    def is_there(self, content: Tensor) -> bool:
        return True

    def rows(self, content: Tensor) -> Tensor:
        return content

    def given(self, rows: Tensor) -> Tensor:
        return rows

    def let_go(self, content: Tensor) -> None:
        """Its memory goes back when the last view of it is gone."""


# Features in a snapshot: two tensors that say themselves what they are, checked before use.
# Knows the ring's rows, not the ring: what one ring exported another of any capacity takes up.


META = "dflash_feature_meta"
DATA = "dflash_feature_data"
SCHEMA = 1
NUM_FIELDS = 4  # schema, begin, end, hidden size; the taps follow


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows of positions `[begin, begin + tokens)`: [tokens, taps * hidden] in host memory."""

    begin: int
    rows: Tensor


def encode(spec: FeatureSpec, features: FeatureRows) -> dict[str, Tensor]:
    """The tensors of a node: `dflash_feature_meta` int64 [4 + taps] = schema, begin, end, hidden
    size, taps; `dflash_feature_data` [end - begin, taps * hidden], the rows themselves.
    Raises ValueError for rows that are not of `spec`, or none.
    """
    rows, begin = features.rows, features.begin
    if rows.ndim != 2 or rows.shape[1] != spec.width or not len(rows) or rows.dtype not in FLOATS:
        raise ValueError(
            f"rows {rows.dtype} {tuple(rows.shape)}: [1 or more, {spec.width}] is expected"
        )
    meta = (SCHEMA, begin, begin + len(rows), spec.hidden_size, *spec.taps)
    return {META: torch.tensor(meta, dtype=torch.int64), DATA: rows}


def decode(
    spec: FeatureSpec, tensors: Mapping[str, Tensor], *, begin: int, end: int
) -> FeatureRows | None:
    """The features among the tensors of a node of tokens `[begin, end)`; None where it has none.

    Raises SnapshotMismatch for features of another drafter or another span, or tensors that do
    not agree with each other: such a node is to be treated as one without features.
    """
    present = tensors.keys() & {META, DATA}
    if not present:
        return None
    if len(present) == 1:
        raise SnapshotMismatch(f"{present.pop()} came alone; {META} and {DATA} go together")
    first, last = _checked_span(spec, tensors[META])
    if not begin <= first < last == end:
        raise SnapshotMismatch(
            f"features of positions [{first}, {last}) in a node of [{begin}, {end}): "
            "they must lie in it and reach its end"
        )
    rows = tensors[DATA]
    if rows.shape != (last - first, spec.width) or rows.dtype not in FLOATS:
        raise SnapshotMismatch(
            f"{DATA}: {rows.dtype} {tuple(rows.shape)}, "
            f"expected a float tensor {(last - first, spec.width)}"
        )
    return FeatureRows(first, rows)


def _checked_span(spec: FeatureSpec, meta: Tensor) -> tuple[int, int]:
    """begin and end of what `meta` describes; it must be of this schema and this drafter."""
    if meta.dtype != torch.int64 or meta.ndim != 1 or len(meta) <= NUM_FIELDS:
        raise SnapshotMismatch(
            f"{META}: {meta.dtype} {tuple(meta.shape)}, "
            f"expected int64 of {NUM_FIELDS} fields and the taps"
        )
    schema, begin, end, hidden_size, *taps = meta.tolist()
    if schema != SCHEMA:
        raise SnapshotMismatch(f"{META}: schema {schema}, expected {SCHEMA}")
    if (tuple(taps), hidden_size) != (spec.taps, spec.hidden_size):
        raise SnapshotMismatch(
            f"features of layers {taps} of {hidden_size} numbers each; this drafter reads "
            f"layers {list(spec.taps)} of {spec.hidden_size}"
        )
    return begin, end
