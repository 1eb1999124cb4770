"""Features of nodes: rows that lanes left behind, where they lie, and their tensors in a snapshot.

Knows no tree. A node without features is no error: the drafter then proposes from less context.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copy_stream import copy_beside
from luceasync.host_cache.nodes import Span
from luceasync.nodes import NodeKey
from luceasync.pipeline.platform import Event
from luceasync.speculation.dflash.features import FLOATS, FeatureSpec
from luceasync.speculation.dflash.passes import LocalDraft

log = logging.getLogger(__name__)

C = TypeVar("C")


class FeaturePart(NamedTuple, Generic[C]):
    """Rows `[begin, end)` of a content."""

    content: C
    begin: int
    end: int


class FeatureContents(Protocol[C]):
    """What nodes hold of a drafter, wherever drafter and memory are. Engine thread only."""

    spec: FeatureSpec
    capacity_tokens: int  # of a lane
    row_bytes: int

    def held(self, lane: int, begin: int, end: int) -> range:
        """The positions of `[begin, end)` that a node can keep; see LaneSpans.held."""
        ...

    def save(self, lane: int, begin: int, end: int) -> C:
        """Copy the lane's rows of positions `[begin, end)`, which it holds. Raises MemoryError."""
        ...

    def restore(self, lane: int, begin: int, parts: Sequence[FeaturePart[C]]) -> None:
        """Give the lane these rows, one part after the other, of positions from `begin` on, and no
        others.
        """
        ...

    def is_there(self, content: C) -> bool:
        """Whether it still exists: it may have been lost with a process."""
        ...

    def export(self, content: C) -> Tensor | None:
        """The rows, [tokens, taps * hidden] on the host, not to be changed; None: they are lost."""
        ...

    def adopt(self, rows: Tensor) -> C:
        """A content of rows on the host, [tokens, taps * hidden] of a dtype of FLOATS. Raises
        MemoryError if they must be copied.
        """
        ...

    def drop(self, content: C) -> None:
        """Forget it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SavedRows:
    """Rows on the host, [tokens, taps * hidden], once `arrival` has come; None: they are there."""

    rows: Tensor
    arrival: Event | None = None

    def here(self) -> Tensor:
        """The rows; waits for them."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.rows


class LocalFeatures:
    """See FeatureContents: of a drafter in this process, in memory for nodes. Saves are copies in
    the order of the passes; nothing waits for them before the rows are read.
    """

    def __init__(self, draft: LocalDraft[Any], memory: HostMemory) -> None:
        ring = draft.ring
        self.spec, self.capacity_tokens = ring.spec, ring.capacity_tokens
        self.row_bytes = ring.spec.width * ring.store.element_size()
        self._draft = draft
        self._ring = ring
        self._memory = memory
        self._under_way: list[SavedRows] = []  # their memory is written still

    def held(self, lane: int, begin: int, end: int) -> range:
        return self._ring.held(lane, begin, end)

    @torch.inference_mode()
    def save(self, lane: int, begin: int, end: int) -> SavedRows:
        self._under_way = [s for s in self._under_way if s.arrival and not s.arrival.query()]
        rows = self._ring.rows(lane, begin, end)
        source = rows.reshape(-1).view(torch.uint8)
        host = torch.frombuffer(self._memory.allocate(source.numel()), dtype=torch.uint8)
        copy_beside([(host, source)])
        arrival = self._ring.platform.record_event()
        self._under_way.append(SavedRows(host.view(rows.dtype).view(rows.shape), arrival))
        return self._under_way[-1]

    @torch.inference_mode()
    def restore(self, lane: int, begin: int, parts: Sequence[FeaturePart[SavedRows]]) -> None:
        rows = [part.content.here()[part.begin : part.end] for part in parts]
        self._draft.restore(lane, begin, torch.cat(rows))

    def is_there(self, content: SavedRows) -> bool:
        return True

    def export(self, content: SavedRows) -> Tensor:
        return content.here()

    def adopt(self, rows: Tensor) -> SavedRows:
        return SavedRows(rows)

    def drop(self, content: SavedRows) -> None:
        """Do nothing: the memory is freed with the last view of it."""


# The tensors of a snapshot describe themselves, and are checked before use. What one ring exported,
# a ring of any other capacity can restore.
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
    """The features among the tensors of a node of tokens `[begin, end)`; None: it has none.

    Raises SnapshotMismatch for features of another drafter or another span, or tensors that
    contradict each other. Treat such a node as one without features.
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
    """The span that `meta` describes. Raises SnapshotMismatch for another schema or drafter."""
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


class RestoredFeatures(Protocol):
    """Is told which features a lane was given; see Speculator."""

    def restored(self, lane: int, end: int, *, with_features: bool) -> None: ...


class _NodeFeatures(NamedTuple, Generic[C]):
    """Rows of positions `span`, of a node whose tokens begin at `begin`."""

    begin: int
    span: range
    content: C


class DraftFeatures(Generic[C]):
    """The features of nodes, by key: a holder beside those of the target's shards."""

    def __init__(self, contents: FeatureContents[C], speculator: RestoredFeatures) -> None:
        self._contents = contents
        self._speculator = speculator
        self._nodes: dict[NodeKey, _NodeFeatures[C]] = {}

    @property
    def reach_tokens(self) -> int:
        """How many tokens before its end a lane needs the features of."""
        return self._contents.capacity_tokens

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of the features of a node of `num_tokens` tokens."""
        return min(num_tokens, self._contents.capacity_tokens) * self._contents.row_bytes

    def save(self, lane: int, node: NodeKey, span: Span) -> None:
        """Save what the lane still has of the span's features. Raises MemoryError."""
        rows = self._contents.held(lane, span.begin, span.end)
        features = None
        if rows:
            content = self._contents.save(lane, rows.start, rows.stop)
            features = _NodeFeatures(span.begin, rows, content)
        self._put(node, features)

    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> None:
        """Give the lane the features before its end: from the last node back, until one has none,
        or enough are there.
        """
        parts: list[FeaturePart[C]] = []
        first = num_tokens
        for node in reversed(nodes):
            held = self._nodes.get(node)
            if held is None or not self._contents.is_there(held.content):
                break
            if held.span.start >= first:  # beyond the part of the node that is restored
                break
            parts.append(FeaturePart(held.content, 0, first - held.span.start))
            first = held.span.start
            if first > held.begin or num_tokens - first >= self._contents.capacity_tokens:
                break
        self._speculator.restored(lane, num_tokens, with_features=bool(parts))
        if parts:
            self._contents.restore(lane, first, parts[::-1])

    def export(self, node: NodeKey) -> dict[str, Tensor]:
        """The node's features in host memory, by name; empty if it has none, or they are lost."""
        held = self._nodes.get(node)
        rows = None if held is None else self._contents.export(held.content)
        if held is None or rows is None:
            return {}
        return encode(self._contents.spec, FeatureRows(held.span.start, rows))

    def adopt(self, node: NodeKey, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Take what `export` returned; nothing if the features are another drafter's. Raises
        MemoryError if they must be copied.
        """
        found = None
        try:
            found = decode(self._contents.spec, tensors, begin=span.begin, end=span.end)
        except SnapshotMismatch as error:
            log.debug("features are not used: %s", error)
        features = None
        if found is not None:
            content = self._contents.adopt(found.rows)
            features = _NodeFeatures(span.begin, range(found.begin, span.end), content)
        self._put(node, features)

    def drop(self, node: NodeKey) -> None:
        """Forget the node's features, if it has any."""
        self._put(node, None)

    def _put(self, node: NodeKey, features: _NodeFeatures[C] | None) -> None:
        before = self._nodes.pop(node, None)
        if features is not None:
            self._nodes[node] = features
        if before is not None:
            self._contents.drop(before.content)
