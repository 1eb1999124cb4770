"""Moves state between a lane and named tensors: the target's, the logits, the draft's features.

Owns what of a node is not the target's. Knows no tree and no file; a node is a name to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from luceasync.errors import SnapshotMismatch
from luceasync.hoststore.nodes import Nodes, Span
from luceasync.hoststore.tickets import Arrived, Ticket
from luceasync.kv.pages import num_chunks
from luceasync.node_words import NodeKey

LOGITS = "snap_prefill_logits"
TOKENS = "tokens"
FEATURE_META, FEATURE_DATA = "dflash_feature_meta", "dflash_feature_data"
LEDGER = "kvflash_ledger"  # float32 [chunks, 2]: whether each was on the devices, and its worth
OWN_NAMES = frozenset((LOGITS, TOKENS, FEATURE_META, FEATURE_DATA, LEDGER))


class Features(Protocol):
    """The draft's side of a lane: rows of features, which a draft proposes from."""

    @property
    def num_tokens(self) -> int:
        """How many tokens before its end a lane needs the features of."""
        ...

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes that a node of `num_tokens` tokens keeps."""
        ...

    def rows_of(self, lane: int, begin: int, end: int) -> dict[str, Tensor]:
        """What the lane holds of the span's features, by name; nothing where it holds none."""
        ...

    def take_up(
        self,
        lane: int,
        spans: Sequence[tuple[int, int, Mapping[str, Tensor]]],
        num_tokens: int,
    ) -> None:
        """Take up the features of the first `num_tokens` tokens of a chain of spans (begin, end,
        tensors), as far as they reach back without a gap.
        """
        ...


class NoFeatures:
    """Of a server without a draft."""

    @property
    def num_tokens(self) -> int:
        return 0

    def num_bytes(self, num_tokens: int) -> int:
        return 0

    def rows_of(self, lane: int, begin: int, end: int) -> dict[str, Tensor]:
        return {}

    def take_up(
        self,
        lane: int,
        spans: Sequence[tuple[int, int, Mapping[str, Tensor]]],
        num_tokens: int,
    ) -> None:
        return None


class Lanes(Protocol):
    """Lanes of which a part may lie in nodes alone; luceasync.pipeline.paging has them."""

    @property
    def own_bytes(self) -> int:
        """Host memory that lanes take for what no node holds."""
        ...

    def kept(self, lane: int, node: NodeKey, span: Span) -> None:
        """The node holds what the span has left in the lane."""
        ...

    def exact_end(self, lane: int, end: int) -> int:
        """How many of the lane's first `end` tokens are what full attention makes of them."""
        ...

    def ledger(self, lane: int, end: int) -> Sequence[tuple[bool, float]] | None:
        """Of each chunk of the lane's first `end` tokens whether it is on the devices, and what it
        is worth, not a number where nobody knows; None where all of them are.
        """
        ...

    def expect(self, lane: int, ledger: Sequence[tuple[bool, float]]) -> None:
        """The same where the lane is to be restored to next."""
        ...


class WholeLanes:
    """Lanes that hold all that they stand for."""

    own_bytes = 0

    def kept(self, lane: int, node: NodeKey, span: Span) -> None:
        """They hold it too."""

    def exact_end(self, lane: int, end: int) -> int:
        return end

    def ledger(self, lane: int, end: int) -> None:
        return None

    def expect(self, lane: int, ledger: Sequence[tuple[bool, float]]) -> None:
        """All of it comes."""


WHOLE_LANES = WholeLanes()


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
    features: dict[str, Tensor]
    end: dict[str, Tensor]  # beside the state at the span's end


class MemoryNodes:
    """Nodes in memory, by name. Synchronous; engine thread only."""

    def __init__(
        self,
        target: Nodes,
        features: Features,
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
            features = self._features.rows_of(lane, span.begin, span.end) if with_features else {}
        except MemoryError:
            self._target.drop(node)
            raise
        at_end = {}
        if logits is not None:
            at_end[LOGITS] = logits.detach().to("cpu", torch.float32, copy=True)
        if (ledger := self.lanes.ledger(lane, span.end)) is not None:
            at_end[LEDGER] = torch.tensor(ledger, dtype=torch.float32).view(-1, 2)
        self._extras[node] = _Extras(span, ticket, features, at_end)
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
        spans = [(e.span.begin, e.span.end, e.features) for e in held]
        self._features.take_up(lane, spans, num_tokens)
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
        ids = torch.frombuffer(tokens, dtype=torch.int32)
        return tensors | extras.features | {TOKENS: ids}

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
        owns its tensors then.
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
        self._extras[node] = _Extras(span, Arrived(), features, at_end)

    def drop(self, node: NodeKey, *, state_only: bool = False) -> None:
        """Forget the node, if it is here, or what belongs to its end alone."""
        self._target.drop(node, state_only=state_only)
        extras = self._extras.get(node) if state_only else self._extras.pop(node, None)
        if extras is not None and state_only:
            extras.end = {}
            extras.span = replace(extras.span, with_state=False)
