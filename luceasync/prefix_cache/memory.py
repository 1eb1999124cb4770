"""Nodes in host memory: the target's tensors, the logits and the draft's features, under one key.

Owns the parts of a node that belong to neither target nor draft. Does not know the tree or files.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.copy_stream import DoneTicket, Ticket
from luceasync.host_cache.nodes import Nodes, Span
from luceasync.kv.pages import num_chunks
from luceasync.nodes import NodeKey
from luceasync.pipeline.paging import Paging

LOGITS = "snap_prefill_logits"
TOKENS = "tokens"
FEATURE_META, FEATURE_DATA = "dflash_feature_meta", "dflash_feature_data"
LEDGER = "kvflash_ledger"  # float32 [chunks, 2]: whether each was on the devices, and its score
OWN_NAMES = frozenset((LOGITS, TOKENS, FEATURE_META, FEATURE_DATA, LEDGER))


class FeatureHolder(Protocol):
    """Holds the draft's part of nodes: rows of features, from which a draft proposes."""

    @property
    def reach_tokens(self) -> int:
        """How many tokens before its end a lane needs the features of."""
        ...

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes that a node of `num_tokens` tokens takes."""
        ...

    def save(self, lane: int, node: NodeKey, span: Span) -> None:
        """Keep the lane's features of the span, as far as it has any, replacing what was held.
        Raises MemoryError."""
        ...

    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> None:
        """Give the lane the features of the first `num_tokens` tokens of a chain of nodes, as far
        back from the end as they are held without a gap."""
        ...

    def export(self, node: NodeKey) -> dict[str, Tensor]:
        """The node's features in host memory, by name; empty where none are held."""
        ...

    def adopt(self, node: NodeKey, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Hold what `export` returned, replacing what was held; hold nothing if the features are
        another drafter's. Raises MemoryError where they are copied."""
        ...

    def drop(self, node: NodeKey) -> None:
        """Forget the node's features, if any are held."""
        ...


class UnreadFeatures:
    """Features on a server without a drafter: kept as they were read from the disk, for a server
    that has one."""

    def __init__(self) -> None:
        self._tensors: dict[NodeKey, dict[str, Tensor]] = {}

    @property
    def reach_tokens(self) -> int:
        return 0

    def num_bytes(self, num_tokens: int) -> int:
        return 0

    def save(self, lane: int, node: NodeKey, span: Span) -> None:
        self.drop(node)

    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> None:
        """No-op: lanes have no features."""

    def export(self, node: NodeKey) -> dict[str, Tensor]:
        return dict(self._tensors.get(node, {}))

    def adopt(self, node: NodeKey, span: Span, tensors: Mapping[str, Tensor]) -> None:
        self._tensors[node] = dict(tensors)

    def drop(self, node: NodeKey) -> None:
        self._tensors.pop(node, None)


@dataclass(frozen=True, slots=True)
class NodeSize:
    """Bytes of what a span's tokens left behind, and of what belongs to its end only."""

    span_bytes: int
    end_bytes: int


@dataclass(slots=True)
class _MemoryNode:
    """`end`: the tensors of the span's end other than the state; `ticket`: of the copies out of the
    lane."""

    span: Span
    ticket: Ticket
    end: dict[str, Tensor]


class MemoryNodes:
    """Nodes by key. Synchronous; engine thread only."""

    def __init__(
        self, target: Nodes, features: FeatureHolder, vocab_size: int, lanes: Paging
    ) -> None:
        self.lanes = lanes
        self._target = target
        self._features = features
        self._vocab_size = vocab_size
        self._nodes: dict[NodeKey, _MemoryNode] = {}

    @property
    def num_feature_tokens(self) -> int:
        """How many tokens before the end of a prefix the draft needs the features of."""
        return self._features.reach_tokens

    def size(self, span: Span, *, with_logits: bool, with_features: bool) -> NodeSize:
        """The bytes that a node of the span takes."""
        span_bytes, state_bytes = self._target.sizes.of(span)
        num_rows = span.end - span.begin if with_features else 0
        logits_bytes = 4 * self._vocab_size if with_logits else 0
        return NodeSize(span_bytes + self._features.num_bytes(num_rows), state_bytes + logits_bytes)

    @property
    def token_size(self) -> NodeSize:
        """The bytes of one token far from a prompt's end, and of the state after it."""
        return self.size(Span(0, 1, with_state=True), with_logits=False, with_features=False)

    def save(
        self, lane: int, node: NodeKey, span: Span, logits: Tensor | None, *, with_features: bool
    ) -> None:
        """Keep what the span left in the lane, and the logits after it, float32 [vocab]. Raises
        MemoryError and keeps nothing then."""
        ticket = self._target.save(lane, node, span)  # queued before the rest waits for the device
        try:
            if with_features:
                self._features.save(lane, node, span)
            else:
                self._features.drop(node)
        except MemoryError:
            self._target.drop(node)
            raise
        at_end = {}
        if logits is not None:
            at_end[LOGITS] = logits.detach().to("cpu", torch.float32, copy=True)
        if (ledger := self.lanes.ledger(lane, span.end)) is not None:
            at_end[LEDGER] = torch.tensor(ledger, dtype=torch.float32).view(-1, 2)
        self._nodes[node] = _MemoryNode(span, ticket, at_end)
        self.lanes.node_saved(lane, node, span)

    def ticket(self, node: NodeKey) -> Ticket:
        """Done when all of the node has arrived in host memory; until then `export` waits."""
        return self._nodes[node].ticket

    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> Ticket:
        """Restore the first `num_tokens` tokens of a chain of nodes that begins at 0 into the lane;
        they have arrived when the ticket is done."""
        ledger = self._nodes[nodes[-1]].end.get(LEDGER)
        if ledger is not None:
            self.lanes.expect_restore(lane, [(here > 0, worth) for here, worth in ledger.tolist()])
        ticket = self._target.restore(lane, nodes, num_tokens)
        self._features.restore(lane, nodes, num_tokens)
        return ticket

    def logits(self, node: NodeKey) -> Tensor:
        """The logits after the node's last token, float32 [vocab]."""
        logits = self._nodes[node].end.get(LOGITS)
        assert logits is not None, f"node {node.hex()}: an exact hit without its logits"
        return logits

    def export(self, node: NodeKey, tokens: array[int], *, with_end: bool) -> dict[str, Tensor]:
        """All tensors of the node in host memory, by name; without its end, only those of its
        tokens. They must not be changed."""
        held = self._nodes[node]
        tensors = self._target.export(node)
        if not with_end:
            rows = self._target.shapes(replace(held.span, with_state=False))
            tensors = {name: tensors[name] for name in rows}
        else:
            tensors |= held.end
        tensors |= self._features.export(node)
        return tensors | {TOKENS: torch.frombuffer(tokens, dtype=torch.int32)}

    def export_end(self, node: NodeKey) -> dict[str, Tensor]:
        """The tensors of the node's end only, by name; see export."""
        held = self._nodes[node]
        rows = self._target.shapes(replace(held.span, with_state=False))
        tensors = {n: t for n, t in self._target.export(node).items() if n not in rows}
        return tensors | held.end

    def adopt(
        self, node: NodeKey, span: Span, tokens: array[int], tensors: Mapping[str, Tensor]
    ) -> None:
        """Own what `export` returned, under any split, replacing what is held.

        Raises SnapshotMismatch for another node's or another model's tensors; the caller still owns
        them then. Raises MemoryError if something has to be copied and there is no room.
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
        features = {n: t for n, t in tensors.items() if n in (FEATURE_META, FEATURE_DATA)}
        try:
            self._features.adopt(node, span, features)
        except MemoryError:
            self._target.drop(node)
            raise
        self._nodes[node] = _MemoryNode(span, DoneTicket(), at_end)

    def drop(self, node: NodeKey, *, state_only: bool = False) -> None:
        """Forget the node, if it is held, or only what belongs to its end."""
        self._target.drop(node, state_only=state_only)
        if not state_only:
            self._features.drop(node)
            self._nodes.pop(node, None)
        elif (held := self._nodes.get(node)) is not None:
            held.end = {}
            held.span = replace(held.span, with_state=False)
