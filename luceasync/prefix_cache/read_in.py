"""Which nodes are on their way from the disk, and the memory that they take on arrival.

Owns the transfers from the disk to memory. Does not know leases: the caller says what to read, and
reserves the memory for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from luceasync.disk_cache.codec import NodePart
from luceasync.disk_cache.outcomes import Miss
from luceasync.errors import SnapshotMismatch, StageFailed
from luceasync.host_cache.nodes import Span
from luceasync.nodes import MissReason, NodeKey
from luceasync.prefix_cache.disk_orders import DiskOrders, FetchedNode, ReadOrder
from luceasync.prefix_cache.index import NodeIndex
from luceasync.prefix_cache.memory import MemoryNodes
from luceasync.prefix_tree.node import DISK, MEMORY, NOWHERE, Match, Node, Tier

log = logging.getLogger(__name__)


class ReadIn:
    """Nodes that are read from the disk; each is read once, however many leases wait for it."""

    def __init__(
        self, index: NodeIndex, memory: MemoryNodes, disk: DiskOrders, *, recurrent: bool
    ) -> None:
        self._index = index
        self._memory = memory
        self._disk = disk
        self._recurrent = recurrent
        self._coming: dict[NodeKey, int] = {}  # how much memory each will take

    def __iter__(self) -> Iterator[NodeKey]:
        """Keys of the nodes that must stay."""
        return iter(self._coming)

    def __repr__(self) -> str:
        return f"{len(self._coming)} nodes to come"

    @property
    def num_bytes(self) -> int:
        """Memory that nodes in transit will take."""
        return sum(self._coming.values())

    def num_bytes_of(self, orders: Iterable[ReadOrder]) -> int:
        """Memory that the orders will take in addition."""
        return sum(self.size(order) for order in orders if order.key not in self._coming)

    def orders(self, match: Match) -> list[ReadOrder]:
        """What has to be read before the match can be restored."""
        orders = []
        for node in nodes_of(match):
            is_end = match.part is None and node is match.nodes[-1]
            wants_state = is_end and self._recurrent and "memory" not in node.state_tiers
            wants_logits = is_end and match.exact and "memory" not in node.logits_tiers
            if wants_state or wants_logits or "memory" not in node.tiers:
                near = match.num_tokens - node.end < self._memory.num_feature_tokens
                orders.append(ReadOrder(node.key, with_end=wants_state or wants_logits or near))
        return orders

    def give_up(self, keys: Iterable[NodeKey]) -> None:
        """Stop reading these nodes. Nodes that have already arrived are kept."""
        self._disk.give_up([key for key in keys if key in self._coming])

    def begin(self, orders: Sequence[ReadOrder], timeout_s: float | None = None) -> None:
        """Read what is not in transit already, each node within `timeout_s`."""
        coming = self._coming
        new = [replace(order, timeout_s=timeout_s) for order in orders if order.key not in coming]
        self._coming |= {order.key: self.size(order) for order in new}
        self._disk.read(new)

    def fetched(self, key: NodeKey, result: FetchedNode | Miss) -> Miss | None:
        """Adopt a node that has arrived; returns None, or why it is unusable."""
        self._coming.pop(key, None)
        return result if isinstance(result, Miss) else self._adopt(key, result)

    def size(self, order: ReadOrder) -> int:
        """How much memory the node will take on arrival."""
        node = self._index.node(order.key)
        assert node is not None, "what is ordered is in the tree"
        return node.num_bytes + (node.state_bytes if order.with_end else 0)

    def _adopt(self, key: NodeKey, fetched: FetchedNode) -> Miss | None:
        node = self._index.node(key)
        if node is None:
            return Miss(MissReason.GONE, "dropped meanwhile, with its ancestors")
        if fetched.file_parts is not None:
            self._index.set_tiers(_held(node, DISK, fetched.file_parts))
        if not _gains(node, fetched.parts):
            return None  # a prefill has saved it meanwhile
        with_state = NodePart.STATE in fetched.parts
        span = Span(node.begin, node.end, with_state=with_state)
        try:
            self._memory.adopt(key, span, node.tokens, fetched.tensors)
        except SnapshotMismatch as error:
            log.warning("node %s is quarantined: %s", key.hex()[:16], error)
            self._disk.quarantine(key)
            return Miss(MissReason.CORRUPT, str(error))
        except MemoryError as error:
            self._index.drop(key, "memory")  # memory lost its part of the node, too
            return Miss(MissReason.NO_MEMORY, str(error))
        except StageFailed:
            self._index.drop(key, "memory")
            raise
        self._index.set_tiers(_held(node, MEMORY, fetched.parts))
        return None


def nodes_of(match: Match) -> list[Node]:
    """The nodes that the match restores, root first."""
    return [*match.nodes, *([] if match.part is None else [match.part])]


def _held(node: Node, tiers: frozenset[Tier], parts: frozenset[NodePart]) -> Node:
    """The node as `tiers` hold it, with these parts of its end."""
    return replace(
        node,
        tiers=tiers,
        state_tiers=tiers if NodePart.STATE in parts else NOWHERE,
        logits_tiers=tiers if NodePart.LOGITS in parts else NOWHERE,
    )


def _gains(node: Node, parts: frozenset[NodePart]) -> bool:
    """Whether memory holds more of the node if these parts replace what it has."""
    if "memory" not in node.tiers:
        return True
    tiers = {NodePart.STATE: node.state_tiers, NodePart.LOGITS: node.logits_tiers}
    has = {part for part, held in tiers.items() if "memory" in held}
    return has < parts & tiers.keys()
