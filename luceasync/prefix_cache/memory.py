"""Moves state between a lane and named tensors: the target's, the logits, the draft's features.

Owns what of a node is not the target's. Knows no tree and no file; a node is a name to it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.copy_stream import Arrived, Ticket
from luceasync.host_cache.nodes import Nodes, Span
from luceasync.kv.pages import num_chunks
from luceasync.nodes import NodeKey
from luceasync.prefix_cache.lanes import WHOLE_LANES, Lanes
from luceasync.speculation.dflash.feature_contents import (
    FeatureContents,
    FeatureRows,
    Part,
    decode,
    encode,
)

LOGITS = "snap_prefill_logits"
TOKENS = "tokens"
FEATURE_META, FEATURE_DATA = "dflash_feature_meta", "dflash_feature_data"
LEDGER = "kvflash_ledger"  # float32 [chunks, 2]: whether each was on the devices, and its worth
OWN_NAMES = frozenset((LOGITS, TOKENS, FEATURE_META, FEATURE_DATA, LEDGER))


C = TypeVar("C")


class FeatureHolder(Protocol[C]):
    """The draft's side of a lane: rows of features, which a draft proposes from."""

    @property
    def num_tokens(self) -> int:
        """How many tokens before its end a lane needs the features of."""
        ...

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes that a node of `num_tokens` tokens keeps."""
        ...

    def take_out(self, lane: int, begin: int, end: int) -> C | None:
        """Copy what the lane holds of the span's features; None where it holds none. Raises
        MemoryError.
        """
        ...

    def put_in(self, lane: int, chain: Sequence[tuple[int, C | None]], num_tokens: int) -> None:
        """Take up the features of the first `num_tokens` tokens of a chain of spans, of which each
        has its begin and its features, as far as they reach back without a gap.
        """
        ...

    def named(self, held: C) -> dict[str, Tensor]:
        """Its tensors in host memory, by name; none where they are lost."""
        ...

    def given(self, begin: int, end: int, tensors: Mapping[str, Tensor]) -> C | None:
        """What `named` gave for tokens `[begin, end)`; None where nothing of it is this drafter's.
        Raises MemoryError where they are copied.
        """
        ...

    def let_go(self, held: C) -> None:
        """Forget it."""
        ...


class NoFeatures:
    """Of a server without a draft."""

    @property
    def num_tokens(self) -> int:
        return 0

    def num_bytes(self, num_tokens: int) -> int:
        return 0

    def take_out(self, lane: int, begin: int, end: int) -> Mapping[str, Tensor] | None:
        return None

    def put_in(
        self, lane: int, chain: Sequence[tuple[int, Mapping[str, Tensor] | None]], num_tokens: int
    ) -> None:
        return None

    def named(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(held)

    def given(self, begin: int, end: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A server with a draft may want them."""
        return tensors

    def let_go(self, held: Mapping[str, Tensor]) -> None:
        return None


@dataclass(frozen=True, slots=True)
class NodeSize:
    """Bytes of what the span's tokens left, and of what belongs to its end alone."""

    span_bytes: int
    end_bytes: int


@dataclass(slots=True)
class _Extras:
    """What a node holds besides the target's tensors, and when these have come out of a lane."""

    span: Span
    ticket: Ticket
    features: Any  # of the Features that made it, or None
    end: dict[str, Tensor]  # beside the state at the span's end


class MemoryNodes:
    """Nodes in memory, by name. Synchronous; engine thread only."""

    def __init__(
        self,
        target: Nodes,
        features: FeatureHolder[Any],
        vocab_size: int,
        lanes: Lanes = WHOLE_LANES,
    ) -> None:
        self.lanes = lanes
        self._target = target
        self._features = features
        self._vocab_size = vocab_size
        self._extras: dict[NodeKey, _Extras] = {}

    @property
    def num_feature_tokens(self) -> int:
        """How many tokens before the end of a prefix the draft needs the features of."""
        return self._features.num_tokens

    def size(self, span: Span, *, with_logits: bool, with_features: bool) -> NodeSize:
        """What a node of the span takes up."""
        span_bytes, state_bytes = self._target.sizes.of(span)
        num_rows = span.end - span.begin if with_features else 0
        logits_bytes = 4 * self._vocab_size if with_logits else 0
        return NodeSize(span_bytes + self._features.num_bytes(num_rows), state_bytes + logits_bytes)

    @property
    def token_size(self) -> NodeSize:
        """What one token takes up far from a prompt's end, and what the state after it does."""
        return self.size(Span(0, 1, with_state=True), with_logits=False, with_features=False)

    def save(
        self, lane: int, node: NodeKey, span: Span, logits: Tensor | None, *, with_features: bool
    ) -> None:
        """Keep what the span left in the lane, and the logits after it, float32 [vocab]. Raises
        MemoryError; nothing is kept then.
        """
        ticket = self._target.save(lane, node, span)  # queued, while the others wait for the device
        try:
            features = None
            if with_features:
                features = self._features.take_out(lane, span.begin, span.end)
        except MemoryError:
            self._target.drop(node)
            raise
        at_end = {}
        if logits is not None:
            at_end[LOGITS] = logits.detach().to("cpu", torch.float32, copy=True)
        if (ledger := self.lanes.ledger(lane, span.end)) is not None:
            at_end[LEDGER] = torch.tensor(ledger, dtype=torch.float32).view(-1, 2)
        self._put(node, _Extras(span, ticket, features, at_end))
        self.lanes.kept(lane, node, span)

    def ticket(self, node: NodeKey) -> Ticket:
        """When all of it has arrived in host memory: until then an export waits."""
        return self._extras[node].ticket

    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> Ticket:
        """Make the lane stand after `num_tokens` tokens of a chain of nodes that begins at 0; they
        have arrived when the ticket is done.
        """
        held = [self._extras[node] for node in nodes]
        ledger = held[-1].end.get(LEDGER)
        if ledger is not None:
            self.lanes.expect(lane, [(here > 0, worth) for here, worth in ledger.tolist()])
        ticket = self._target.restore(lane, nodes, num_tokens)
        chain = [(each.span.begin, each.features) for each in held]
        self._features.put_in(lane, chain, num_tokens)
        return ticket

    def logits(self, node: NodeKey) -> Tensor:
        """The logits after the node's last token, float32 [vocab]."""
        logits = self._extras[node].end.get(LOGITS)
        assert logits is not None, f"node {node.hex()}: an exact hit without its logits"
        return logits

    def export(self, node: NodeKey, tokens: array[int], *, with_end: bool) -> dict[str, Tensor]:
        """Everything that the node holds, by name, in host memory; without its end only what its
        tokens left. Nothing is to be changed.
        """
        extras = self._extras[node]
        tensors = self._target.export(node)
        if not with_end:
            rows = self._target.shapes(replace(extras.span, with_state=False))
            tensors = {name: tensors[name] for name in rows}
        else:
            tensors |= extras.end
        if extras.features is not None:
            tensors |= self._features.named(extras.features)
        return tensors | {TOKENS: torch.frombuffer(tokens, dtype=torch.int32)}

    def export_end(self, node: NodeKey) -> dict[str, Tensor]:
        """What the node holds for its end alone, by name; see export."""
        extras = self._extras[node]
        rows = self._target.shapes(replace(extras.span, with_state=False))
        tensors = {n: t for n, t in self._target.export(node).items() if n not in rows}
        return tensors | extras.end

    def adopt(
        self, node: NodeKey, span: Span, tokens: array[int], tensors: Mapping[str, Tensor]
    ) -> None:
        """Own what `export` gave, under whatever split, in place of what is held.

        Raises SnapshotMismatch where it is not this node's or not this model's; the caller still
        owns its tensors then. Raises MemoryError where something is copied and has no room.
        """
        found = tensors.get(TOKENS)
        expected = torch.frombuffer(tokens, dtype=torch.int32)
        if found is None or found.dtype != torch.int32 or not torch.equal(found, expected):
            raise SnapshotMismatch(f"node {node.hex()}: its tokens are not those asked for")
        at_end = {name: tensors[name] for name in (LOGITS, LEDGER) if name in tensors}
        for name, shape in ((LOGITS, (self._vocab_size,)), (LEDGER, (num_chunks(span.end), 2))):
            tensor = at_end.get(name)
            if tensor is not None and (
                tensor.dtype != torch.float32 or tuple(tensor.shape) != shape
            ):
                found_type = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise SnapshotMismatch(f"{name}: {found_type}, expected torch.float32 {shape}")
        self._target.adopt(node, span, {n: t for n, t in tensors.items() if n not in OWN_NAMES})
        named = {n: t for n, t in tensors.items() if n in (FEATURE_META, FEATURE_DATA)}
        try:
            features = self._features.given(span.begin, span.end, named)
        except MemoryError:
            self._target.drop(node)
            raise
        self._put(node, _Extras(span, Arrived(), features, at_end))

    def drop(self, node: NodeKey, *, state_only: bool = False) -> None:
        """Forget the node, if it is here, or what belongs to its end alone."""
        self._target.drop(node, state_only=state_only)
        extras = self._extras.get(node) if state_only else self._extras.pop(node, None)
        if extras is None:
            return
        if state_only:
            extras.end = {}
            extras.span = replace(extras.span, with_state=False)
        elif extras.features is not None:
            self._features.let_go(extras.features)

    def _put(self, node: NodeKey, extras: _Extras) -> None:
        before = self._extras.get(node)
        if before is not None and before.features is not None:
            self._features.let_go(before.features)
        self._extras[node] = extras


# The draft's side of a node: which of its tokens have features, and which a prefix needs. Owns
# no rows: a node's are with the drafter, wherever that is. Knows no tree and no target.


log = logging.getLogger(__name__)


class Restored(Protocol):
    """Who speculates from restored features; luceasync.speculation.speculator.Speculator is one."""

    def restored(self, lane: int, end: int, *, with_features: bool) -> None: ...


class Held(NamedTuple, Generic[C]):
    """Rows of positions `span`."""

    span: range
    content: C


class DraftFeatures(Generic[C]):
    """See luceasync.prefix_cache.memory.FeatureHolder."""

    def __init__(self, contents: FeatureContents[C], speculator: Restored) -> None:
        self._contents = contents
        self._speculator = speculator

    @property
    def num_tokens(self) -> int:
        return self._contents.capacity_tokens

    def num_bytes(self, num_tokens: int) -> int:
        return min(num_tokens, self._contents.capacity_tokens) * self._contents.row_bytes

    def take_out(self, lane: int, begin: int, end: int) -> Held[C] | None:
        span = self._contents.held(lane, begin, end)
        if not span:
            return None
        return Held(span, self._contents.take_out(lane, span.start, span.stop))

    def put_in(
        self, lane: int, chain: Sequence[tuple[int, Held[C] | None]], num_tokens: int
    ) -> None:
        """From the last span back, until one has none, or enough are there."""
        parts: list[Part[C]] = []
        first = num_tokens
        for begin, held in reversed(chain):
            if held is None or not self._contents.is_there(held.content):
                break
            if held.span.start >= first:  # of a part that is not taken up
                break
            parts.append(Part(held.content, 0, first - held.span.start))
            first = held.span.start
            if first > begin or num_tokens - first >= self._contents.capacity_tokens:
                break
        self._speculator.restored(lane, num_tokens, with_features=bool(parts))
        if parts:
            self._contents.put_in(lane, first, parts[::-1])

    def named(self, held: Held[C]) -> dict[str, Tensor]:
        rows = self._contents.rows(held.content)
        if rows is None:
            return {}
        return encode(self._contents.spec, FeatureRows(held.span.start, rows))

    def given(self, begin: int, end: int, tensors: Mapping[str, Tensor]) -> Held[C] | None:
        try:
            found = decode(self._contents.spec, tensors, begin=begin, end=end)
        except SnapshotMismatch as error:
            log.debug("features are left unused: %s", error)
            return None
        if found is None:
            return None
        return Held(range(found.begin, end), self._contents.given(found.rows))

    def let_go(self, held: Held[C]) -> None:
        self._contents.let_go(held.content)
