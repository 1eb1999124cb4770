"""Holders of nodes: the protocol, nodes that are spread over several holders, and nodes under their
keys.

A node is what a span of tokens left behind in a lane, under a key. Does not know the tree, files,
or where a holder's memory is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from luceasync.cyext.names import rename_table
from luceasync.errors import SnapshotMismatch, StageFailed
from luceasync.host_cache.copy_stream import Ticket, joined
from luceasync.kv.cache import Shape
from luceasync.nodes import NodeKey

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[begin, end)` of a sequence, and `with_state` the recurrent state at `end`."""

    begin: int
    end: int
    with_state: bool


@dataclass(frozen=True, slots=True)
class NodeSizes:
    """Bytes of the keys and values of a token, and of the recurrent state at a span's end."""

    token_bytes: int
    state_bytes: int

    def of(self, span: Span) -> tuple[int, int]:
        """Bytes of keys and values, and of recurrent state, of a node of this span."""
        num_tokens = span.end - span.begin
        return num_tokens * self.token_bytes, self.state_bytes * span.with_state


class Nodes(Protocol):
    """Holds nodes, wherever their memory is. Synchronous; engine thread only."""

    @property
    def sizes(self) -> NodeSizes:
        """Sizes of nodes; known before anything is saved."""
        ...

    def shapes(self, span: Span) -> dict[str, Shape]:
        """The tensors of a node of the span, by name: `ls<shard>_<kind>.<layer>`."""
        ...

    def save(self, lane: int, node: NodeKey, span: Span) -> Ticket:
        """Keep what `span` left behind in the lane, as `node`. The recurrent state is the current
        one, or the one set aside by the last pass: for a span with state, `span.end` must be the
        lane's position, or that pass's mark. The lane may go on at once; `export` waits for the
        ticket. Raises MemoryError."""
        ...

    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> Ticket:
        """Restore the first `num_tokens` tokens of a chain of nodes that begins at 0 into the lane.
        `num_tokens` lies in the last node; for a family with recurrent layers it is the node's end,
        with its state. The lane's next pass runs after the copies, which delay no other lane once
        the ticket is done."""
        ...

    def span(self, node: NodeKey) -> Span:
        """The span of a node that is held."""
        ...

    def hold(self, lane: int, node: NodeKey, end: int) -> None:
        """Let the lane read the node's tokens up to `end` from host memory, as far as it has no
        page for them, until `release`, even if the node is dropped."""
        ...

    def release(self, lane: int) -> None:
        """The lane was reset: stop holding anything for it."""
        ...

    def drop(self, node: NodeKey, *, state_only: bool = False) -> None:
        """Forget a node, if it is held, or only the recurrent state at its end."""
        ...

    def export(self, node: NodeKey) -> dict[str, Tensor]:
        """All tensors of the node in host memory, by name. They belong to the node and must not be
        changed.
        """
        ...

    def adopt(self, node: NodeKey, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Own tensors of these `shapes`, replacing the former content of `node`. Holders in this
        process copy nothing."""
        ...


class NodesInParts:
    """Nodes of a whole model, each of which is spread over several holders, one for each shard."""

    def __init__(
        self,
        parts: Sequence[Nodes],
        first_layers: Sequence[int],
        make_ready: Callable[[int, int, Sequence[NodeKey]], None],
    ) -> None:
        """`first_layers`: of each shard, by which tensors are named; `make_ready(lane, num_tokens,
        nodes)` empties a lane and gives it pages, before nodes are restored into it."""
        self._parts = tuple(parts)
        self._first_layers = list(first_layers)
        self._make_ready = make_ready

    @property
    def sizes(self) -> NodeSizes:
        sizes = [part.sizes for part in self._parts]
        return NodeSizes(sum(s.token_bytes for s in sizes), sum(s.state_bytes for s in sizes))

    def shapes(self, span: Span) -> dict[str, Shape]:
        return {name: shape for part in self._parts for name, shape in part.shapes(span).items()}

    def save(self, lane: int, node: NodeKey, span: Span) -> Ticket:
        """Raises MemoryError, StageFailed; nothing of the node is held then."""
        try:
            return joined([part.save(lane, node, span) for part in self._parts])
        except (MemoryError, StageFailed):
            self.drop(node)
            raise

    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> Ticket:
        self._make_ready(lane, num_tokens, nodes)
        return joined([part.restore(lane, nodes, num_tokens) for part in self._parts])

    def span(self, node: NodeKey) -> Span:
        return self._parts[0].span(node)

    def hold(self, lane: int, node: NodeKey, end: int) -> None:
        for part in self._parts:
            part.hold(lane, node, end)

    def release(self, lane: int) -> None:
        for part in self._parts:
            part.release(lane)

    def drop(self, node: NodeKey, *, state_only: bool = False) -> None:
        for part in self._parts:
            part.drop(node, state_only=state_only)

    def export(self, node: NodeKey) -> dict[str, Tensor]:
        return {name: tensor for part in self._parts for name, tensor in part.export(node).items()}

    def adopt(self, node: NodeKey, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Own tensors that any split of this model has exported, replacing the former content of
        `node`: all of them, or none. Raises SnapshotMismatch; the caller still owns its tensors
        then. Raises MemoryError where a holder copies them and has no room, and StageFailed;
        nothing of the node is held then."""
        named = renamed(tensors, self._first_layers)
        shares = [part.shapes(span) for part in self._parts]
        check_tensors({name: shape for share in shares for name, shape in share.items()}, named)
        try:
            for part, share in zip(self._parts, shares, strict=True):
                part.adopt(node, span, {name: named[name] for name in share})
        except (MemoryError, StageFailed):  # some holders copy
            self.drop(node)
            raise


def renamed(tensors: Mapping[str, Tensor], first_layers: Sequence[int]) -> dict[str, Tensor]:
    """The tensors under the names of the split whose shards begin at these layers.

    Nothing is copied. Raises SnapshotMismatch for invalid names, or one tensor twice.
    """
    try:
        table = rename_table(list(tensors), list(first_layers))
    except ValueError as error:
        raise SnapshotMismatch(str(error)) from None
    return {table[name]: tensor for name, tensor in tensors.items()}


def check_tensors(expected: Mapping[str, Shape], tensors: Mapping[str, Tensor]) -> None:
    """Raise SnapshotMismatch unless the tensors are exactly the expected ones."""
    if tensors.keys() != expected.keys():
        odd = sorted(tensors.keys() ^ expected.keys())
        raise SnapshotMismatch(f"missing or unexpected tensors: {', '.join(odd[:4])}")
    for name, (shape, dtype) in expected.items():
        found = tensors[name]
        if tuple(found.shape) != shape or found.dtype != dtype:
            raise SnapshotMismatch(
                f"{name}: {found.dtype} {tuple(found.shape)}, expected {dtype} {shape}"
            )
        if found.device != HOST or not found.is_contiguous():
            raise SnapshotMismatch(f"{name}: expected contiguous tensors in host memory")


C = TypeVar("C")


class ChainedNode(NamedTuple, Generic[C]):
    """One node of a chain."""

    span: Span
    content: C


class Contents(Protocol[C]):
    """The contents of nodes, without their keys, in a shard of this process or in a stage in
    another one. A call that raises has changed nothing."""

    @property
    def sizes(self) -> NodeSizes: ...

    def shapes(self, span: Span) -> dict[str, Shape]: ...

    def save(self, lane: int, span: Span) -> tuple[C, Ticket]:
        """Copy what the span left behind in the lane, which may go on at once. Raises
        MemoryError.
        """
        ...

    def restore(self, lane: int, chain: Sequence[ChainedNode[C]], num_tokens: int) -> Ticket:
        """Fill the lane, whose pages are placed, with the first `num_tokens` tokens of a chain."""
        ...

    def export(self, span: Span, content: C) -> dict[str, Tensor]:
        """All of its tensors in host memory, by name."""
        ...

    def adopt(self, span: Span, tensors: Mapping[str, Tensor]) -> C:
        """Make a content of these tensors. Raises MemoryError if they are copied and there is no
        room."""
        ...

    def drop(self, content: C, *, state_only: bool) -> None:
        """Forget the content, or only the state at its end."""
        ...

    def hold(self, lane: int, span: Span, content: C, end: int) -> None: ...

    def release(self, lane: int) -> None: ...

    def close(self) -> None:
        """Wait for all copies. Idempotent."""
        ...


@dataclass(slots=True)
class _NamedNode(Generic[C]):
    span: Span
    content: C


class NodeStore(Generic[C]):
    """Nodes under their keys. Owns their contents."""

    def __init__(self, contents: Contents[C]) -> None:
        self._contents = contents
        self._nodes: dict[NodeKey, _NamedNode[C]] = {}

    def __repr__(self) -> str:
        return f"NodeStore({len(self._nodes)} nodes in {self._contents!r})"

    @property
    def sizes(self) -> NodeSizes:
        return self._contents.sizes

    def shapes(self, span: Span) -> dict[str, Shape]:
        return self._contents.shapes(span)

    def save(self, lane: int, node: NodeKey, span: Span) -> Ticket:
        """Nothing changes if it raises."""
        assert span.begin < span.end, f"no token in {span}"
        content, ticket = self._contents.save(lane, span)
        self._put(node, span, content)
        return ticket

    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> Ticket:
        """The lane's pages must be placed."""
        chain = [
            ChainedNode(held.span, held.content) for held in (self._nodes[node] for node in nodes)
        ]
        begins = [0, *[span.end for span, _ in chain]]
        assert [span.begin for span, _ in chain] == begins[:-1], f"expected a chain, got {nodes}"
        last = chain[-1].span
        assert last.begin < num_tokens <= last.end, f"{num_tokens} tokens do not end in {last}"
        whole = num_tokens == last.end and last.with_state
        assert whole or not self.sizes.state_bytes, f"no state at {num_tokens} in {last}"
        return self._contents.restore(lane, chain, num_tokens)

    def span(self, node: NodeKey) -> Span:
        return self._nodes[node].span

    def hold(self, lane: int, node: NodeKey, end: int) -> None:
        held = self._nodes[node]
        self._contents.hold(lane, held.span, held.content, end)

    def release(self, lane: int) -> None:
        self._contents.release(lane)

    def export(self, node: NodeKey) -> dict[str, Tensor]:
        held = self._nodes[node]
        return self._contents.export(held.span, held.content)

    def adopt(self, node: NodeKey, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Nothing changes if it raises."""
        self._put(node, span, self._contents.adopt(span, tensors))

    def drop(self, node: NodeKey, *, state_only: bool = False) -> None:
        held = self._nodes.get(node) if state_only else self._nodes.pop(node, None)
        if held is None:
            return
        self._contents.drop(held.content, state_only=state_only)
        if state_only:
            held.span = replace(held.span, with_state=False)

    def sift(self, keeps: Callable[[Span, C], bool]) -> list[NodeKey]:
        """Forget the nodes for which `keeps` returns False because their content is lost; returns
        their keys."""
        gone = [key for key, held in self._nodes.items() if not keeps(held.span, held.content)]
        for key in gone:
            del self._nodes[key]
        return gone

    def close(self) -> None:
        """Forget everything."""
        self._contents.close()
        self._nodes.clear()

    def _put(self, node: NodeKey, span: Span, content: C) -> None:
        self.drop(node)
        self._nodes[node] = _NamedNode(span, content)
