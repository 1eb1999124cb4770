"""Which nodes are to be written to the disk, in which order, and what became of it.

Owns the queue between memory and the disk. Knows no generations; whether a node is worth a file is
decided by whoever adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from luceasync.hoststore.tickets import Call, Ticket
from luceasync.keeping.disk_orders import DiskOrders, KeptNode
from luceasync.keeping.memory_nodes import MemoryNodes
from luceasync.keeping.node_index import Limits, NodeIndex
from luceasync.node_words import NodeKey
from luceasync.nodefiles.layout import Part
from luceasync.prefix.node import NOWHERE, Node, Tier

DISK: frozenset[Tier] = frozenset(("disk",))
NOTHING: frozenset[Part] = frozenset()
MAX_WRITING = 2  # nodes that are handed to the disk at a time; the others wait by key

Hear = Callable[[Ticket, Call], None]  # call in the engine's thread once the ticket is done


@dataclass(frozen=True, slots=True)
class _Write:
    """A file that the disk is writing, and what of the node's end goes into it. `is_void`: the
    node was forgotten meanwhile; what is kept under its key later is not what the file holds.
    """

    key: NodeKey
    with_end: bool
    ends: frozenset[Part]
    is_void: bool = False


class MemoryToDisk:
    """Nodes on their way to files, parents before what continues them."""

    def __init__(
        self,
        index: NodeIndex,
        memory: MemoryNodes,
        disk: DiskOrders,
        limits: Limits,
        hear: Hear,
    ) -> None:
        self._index = index
        self._memory = memory
        self._disk = disk
        self._hear = hear
        self._limits = limits
        self._waiting: dict[NodeKey, bool] = {}  # with what belongs to the node's end, or without
        self._under_way: list[_Write] = []
        self._arriving: NodeKey | None = None  # a node whose copies out of its lane are heard of

    def __iter__(self) -> Iterator[NodeKey]:
        """Keys of the nodes that must stay in memory."""
        yield from self._waiting
        yield from (write.key for write in self._under_way)

    def __len__(self) -> int:
        """How many files are still to be written; may be asked from any thread."""
        return len(self._waiting) + len(self._under_way)

    @property
    def ends(self) -> set[NodeKey]:
        """Keys of those that must keep what belongs to their end."""
        return {key for key, with_end in self._waiting.items() if with_end}

    @property
    def is_due(self) -> bool:
        """Whether `hand_over` has something to do: the disk would take a node, which may have
        arrived in host memory.
        """
        has_room = len(self._under_way) < MAX_WRITING
        return has_room and next(iter(self._waiting), None) not in (None, self._arriving)

    def add(self, node: Node, *, with_end: bool) -> None:
        """Write the node, and before it what it continues, as far as the disk has none of it."""
        if self._limits.disk_bytes is None or node.end < self._limits.min_disk_tokens:
            return
        for key in self._index.chain(node.key):
            above = self._index.node(key)
            assert above is not None
            is_last = key == node.key
            lacks_end = is_last and with_end and _ends(above, "memory") > _ends(above, "disk")
            if "disk" not in above.tiers or lacks_end:
                self._add(above, with_end=is_last and with_end)

    def _add(self, node: Node, *, with_end: bool) -> None:
        ends = _ends(node, "memory") if with_end else NOTHING
        if not any(write.key == node.key and write.ends >= ends for write in self._under_way):
            self._waiting[node.key] = with_end or self._waiting.get(node.key, False)

    def hand_over(self, *, wait: bool = False) -> None:
        """Give the disk nodes that have arrived in host memory, a few at a time; with `wait` all
        of them, however long their copies take.
        """
        while self._waiting and (wait or self.is_due):
            key, with_end = next(iter(self._waiting.items()))
            node = self._index.node(key)
            if node is not None and "memory" in node.tiers and self._has_parent(node):
                ticket = self._memory.ticket(key)
                if not (wait or ticket.is_done):
                    self._arriving = key
                    self._hear(ticket, partial(self._arrived, key))
                    return
                self._hand_over(node, with_end)
            del self._waiting[key]

    def _arrived(self, key: NodeKey) -> None:
        """The copies are over that were heard of; those of another node may not be."""
        if self._arriving == key:
            self._arriving = None
        self.hand_over()

    def written(self, key: NodeKey, *, is_there: bool, again: bool) -> None:
        """What became of the first write of the node that is under way; `again`: the disk was too
        busy.
        """
        write = next(write for write in self._under_way if write.key == key)
        self._under_way.remove(write)
        node = self._index.node(key)
        if again and not write.is_void:
            self._put_first(key, with_end=write.with_end)
        elif not is_there:
            self._drop_orphans()
        elif write.is_void or node is None or not self._has_parent(node):
            self._disk.remove([key])  # nobody may take it up, or could reach it
        else:
            self._index.hold(
                replace(
                    node,
                    tiers=DISK,
                    state_tiers=DISK if Part.STATE in write.ends else NOWHERE,
                    logits_tiers=DISK if Part.LOGITS in write.ends else NOWHERE,
                )
            )
            self._index.saved["disk"] += 1

    def forgotten(self) -> None:
        """Nodes were forgotten because what they hold is wrong: so are the files on their way."""
        self._under_way = [
            replace(write, is_void=write.is_void or write.key not in self._index)
            for write in self._under_way
        ]

    def mend(self, key: NodeKey) -> None:
        """The disk has lost the node. Others there that continue it need it again."""
        node = self._index.node(key)
        if node is not None and any("disk" in n.tiers for n in self._index.children(key)):
            self._put_first(key, with_end=True)

    def _put_first(self, key: NodeKey, *, with_end: bool) -> None:
        """Write the node before what waits already, which may continue it."""
        with_end |= self._waiting.pop(key, False)
        self._waiting = {key: with_end, **self._waiting}

    def _drop_orphans(self) -> None:
        """Nothing is written that continues what the disk does not have."""
        waiting, self._waiting = self._waiting, {}
        for key, with_end in waiting.items():
            node = self._index.node(key)
            if node is not None and (node.parent in self._waiting or self._has_parent(node)):
                self._waiting[key] = with_end

    def _has_parent(self, node: Node) -> bool:
        """Whether what the node continues is on the disk, or will be before it."""
        parent = None if node.parent is None else self._index.node(node.parent)
        is_coming = any(write.key == node.parent for write in self._under_way)
        return node.parent is None or is_coming or (parent is not None and "disk" in parent.tiers)

    def _hand_over(self, node: Node, with_end: bool) -> None:
        ends = _ends(node, "memory") if with_end else NOTHING
        self._under_way.append(_Write(node.key, with_end, ends))
        self._disk.write(
            KeptNode(
                key=node.key,
                parent=node.parent,
                begin=node.begin,
                end=node.end,
                is_turn_end=node.is_turn_end,
                is_generated=node.is_generated,
                tensors=self._memory.export(node.key, node.tokens, with_end=with_end),
            )
        )


def _ends(node: Node, tier: Tier) -> frozenset[Part]:
    """What of the node's end the tier holds."""
    tiers = {Part.STATE: node.state_tiers, Part.LOGITS: node.logits_tiers}
    return frozenset(part for part, held in tiers.items() if tier in held)
