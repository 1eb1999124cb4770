"""Files of tenants that have not come yet: whose they are, only a tenant's key can tell.

Owns these nodes and counts their bytes. Knows no tenant and removes no file.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from luceasync.node_words import NodeKey
from luceasync.prefix.node import NOWHERE, Node


class OwnerlessFiles:
    """Nodes by key, all on the disk."""

    def __init__(self) -> None:
        self._nodes: dict[NodeKey, Node] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, key: NodeKey) -> bool:
        return key in self._nodes

    def add(self, node: Node) -> None:
        """Take in a node, in place of one that had its key."""
        self.discard(node.key)
        self._nodes[node.key] = node
        self.num_bytes += node.bytes_in("disk")

    def discard(self, key: NodeKey) -> None:
        """Forget the node, if it is here."""
        node = self._nodes.pop(key, None)
        if node is not None:
            self.num_bytes -= node.bytes_in("disk")

    def drop_end(self, key: NodeKey) -> None:
        """Of the node only the rows are left."""
        node = self._nodes[key]
        self.add(replace(node, state_tiers=NOWHERE, logits_tiers=NOWHERE))

    def orphans(self, owned: Container[NodeKey], saved_before_s: float) -> list[NodeKey]:
        """Keys of old nodes whose parent is neither here nor owned: nobody can reach them."""
        return [
            node.key
            for node in self
            if node.parent is not None
            and node.parent not in self
            and node.parent not in owned
            and node.saved_at_s < saved_before_s
        ]
