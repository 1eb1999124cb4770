"""Nodes under their names, and chains of them. Owns which nodes there are, and of which spans.

What they hold is a content, which is somebody else's: of a shard in this process or of a group in
another one. Knows no tree, no file and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from luceasync.hoststore.nodes import NodeSizes, Span
from luceasync.hoststore.tickets import Ticket
from luceasync.kv.cache import Shape
from luceasync.node_words import NodeKey

C = TypeVar("C")


class Chained(NamedTuple, Generic[C]):
    """One of a chain of nodes."""

    span: Span
    content: C


class Contents(Protocol[C]):
    """What nodes hold, without their names. All that raises has changed nothing."""

    @property
    def sizes(self) -> NodeSizes:
        """See Nodes."""
        ...

    def shapes(self, span: Span) -> dict[str, Shape]:
        """See Nodes."""
        ...

    def take_out(self, lane: int, span: Span) -> tuple[C, Ticket]:
        """Copy what the span left behind in the lane, which may go on at once. Raises
        MemoryError.
        """
        ...

    def put_in(self, lane: int, chain: Sequence[Chained[C]], num_tokens: int) -> Ticket:
        """Fill the lane, whose pages are placed, with the first `num_tokens` tokens of a chain."""
        ...

    def named(self, span: Span, content: C) -> dict[str, Tensor]:
        """Its tensors in host memory, by name, complete."""
        ...

    def given(self, span: Span, tensors: Mapping[str, Tensor]) -> C:
        """A content of these tensors. Raises MemoryError where they are copied."""
        ...

    def let_go(self, content: C, *, state_only: bool) -> None:
        """Forget it, or the state at its end."""
        ...

    def hold(self, lane: int, span: Span, content: C, end: int) -> None:
        """See Nodes."""
        ...

    def release(self, lane: int) -> None:
        """See Nodes."""
        ...

    def close(self) -> None:
        """Wait for all that is under way. May be called twice."""
        ...


@dataclass(slots=True)
class _Node(Generic[C]):
    span: Span
    content: C


class NodeStore(Generic[C]):
    """See Nodes. `contents` is owned from now on."""

    def __init__(self, contents: Contents[C]) -> None:
        self._contents = contents
        self._nodes: dict[NodeKey, _Node[C]] = {}

    def __repr__(self) -> str:
        return f"NodeStore({len(self._nodes)} nodes in {self._contents!r})"

    @property
    def sizes(self) -> NodeSizes:
        """See Nodes."""
        return self._contents.sizes

    def shapes(self, span: Span) -> dict[str, Shape]:
        """See Nodes."""
        return self._contents.shapes(span)

    def save(self, lane: int, node: NodeKey, span: Span) -> Ticket:
        """See Nodes. Raises MemoryError; nothing has changed then."""
        assert span.begin < span.end, f"no token in {span}"
        content, ticket = self._contents.take_out(lane, span)
        self._put(node, span, content)
        return ticket

    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> Ticket:
        """See Nodes; the lane's pages must be placed."""
        chain = [Chained(held.span, held.content) for held in (self._nodes[node] for node in nodes)]
        begins = [0, *[span.end for span, _ in chain]]
        assert [span.begin for span, _ in chain] == begins[:-1], f"a chain is expected, got {nodes}"
        last = chain[-1].span
        assert last.begin < num_tokens <= last.end, f"{num_tokens} tokens do not end in {last}"
        whole = num_tokens == last.end and last.with_state
        assert whole or not self.sizes.state_bytes, f"no state at {num_tokens} in {last}"
        return self._contents.put_in(lane, chain, num_tokens)

    def span(self, node: NodeKey) -> Span:
        """See Nodes."""
        return self._nodes[node].span

    def hold(self, lane: int, node: NodeKey, end: int) -> None:
        """See Nodes."""
        held = self._nodes[node]
        self._contents.hold(lane, held.span, held.content, end)

    def release(self, lane: int) -> None:
        """See Nodes."""
        self._contents.release(lane)

    def export(self, node: NodeKey) -> dict[str, Tensor]:
        """See Nodes."""
        held = self._nodes[node]
        return self._contents.named(held.span, held.content)

    def adopt(self, node: NodeKey, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """See Nodes. Raises MemoryError; nothing has changed then."""
        self._put(node, span, self._contents.given(span, tensors))

    def drop(self, node: NodeKey, *, state_only: bool = False) -> None:
        """See Nodes."""
        held = self._nodes.get(node) if state_only else self._nodes.pop(node, None)
        if held is None:
            return
        self._contents.let_go(held.content, state_only=state_only)
        if state_only:
            held.span = replace(held.span, with_state=False)

    def sift(self, keeps: Callable[[Span, C], bool]) -> list[NodeKey]:
        """Forget the nodes whose content is gone, of which `keeps` says no; their names."""
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
        self._nodes[node] = _Node(span, content)
