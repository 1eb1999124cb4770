"""Which nodes are to be written to the disk, in which order, and what became of it.

Owns the queue between memory and the disk. Knows no generations; whether a node is worth a file is
decided by whoever adds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from luceasync.disk_cache.codec import Half, Part
from luceasync.host_cache.copy_stream import Call, Ticket
from luceasync.nodes import NodeKey
from luceasync.prefix_cache.disk_orders import DiskOrders, KeptNode, Written
from luceasync.prefix_cache.index import Limits, NodeIndex
from luceasync.prefix_cache.lease import MAX_OPENER_TOKENS, Lease
from luceasync.prefix_cache.memory import MemoryNodes
from luceasync.prefix_tree.node import NOWHERE, Node, Tier

log = logging.getLogger(__name__)

DISK: frozenset[Tier] = frozenset(("disk",))
NOTHING: frozenset[Part] = frozenset()
MAX_WRITING = 2  # files that are handed to the disk at a time; the others wait by key

Hear = Callable[[Ticket, Call], None]  # call in the engine's thread once the ticket is done


File = tuple[NodeKey, Half]  # half a node


@dataclass(frozen=True, slots=True)
class _Write:
    """A file that the disk is writing, of about that size, and what of the node's end goes into it.
    `is_void`: the node was forgotten meanwhile; what is kept under its key later is not what the
    file holds.
    """

    key: NodeKey
    half: Half
    ends: frozenset[Part]
    num_bytes: int
    is_void: bool = False


class MemoryToDisk:
    """Nodes on their way to files: parents before what continues them, rows before their end."""

    def __init__(
        self,
        index: NodeIndex,
        memory: MemoryNodes,
        disk: DiskOrders,
        limits: Limits,
        hear: Hear,
        make_room: Callable[[int], bool],
        let_go: Callable[[], None],
    ) -> None:
        """`make_room(num_bytes)`: whether so much fits on the disk beside what is there;
        `let_go()` is told when nodes need not stay in memory any more, though nothing was written.
        """
        self._index = index
        self._memory = memory
        self._disk = disk
        self._hear = hear
        self._make_room = make_room
        self._let_go = let_go
        self._limits = limits
        self._waiting: dict[File, None] = {}  # in this order
        self._under_way: list[_Write] = []
        self._arriving: NodeKey | None = None  # a node whose copies out of its lane are heard of

    def __iter__(self) -> Iterator[NodeKey]:
        """Keys of the nodes that must stay in memory."""
        yield from (key for key, _ in self._waiting)
        yield from (write.key for write in self._under_way)

    def __len__(self) -> int:
        """How many files are still to be written; may be asked from any thread."""
        return len(self._waiting) + len(self._under_way)

    @property
    def ends(self) -> set[NodeKey]:
        """Keys of those that must keep what belongs to their end."""
        return {key for key, half in self._waiting if half is Half.END}

    def safe_end(self, path: Iterable[Node]) -> int:
        """Where the last of these nodes ends whose state the disk has, or is to have; 0: none."""
        coming = {*self.ends, *(w.key for w in self._under_way if w.half is Half.END)}
        safe = (n.end for n in path if "disk" in n.state_tiers or n.key in coming)
        return max(safe, default=0)

    @property
    def is_due(self) -> bool:
        """Whether `hand_over` has something to do: the disk would take a file, and its node may
        have arrived in host memory.
        """
        has_room = len(self._under_way) < MAX_WRITING
        return has_room and any(key != self._arriving for key, _ in islice(self._waiting, 1))

    def add(self, node: Node, *, with_end: bool) -> None:
        """Write the node, and before it what it continues, as far as the disk has none of it."""
        if self._limits.disk_bytes is None or node.end < self._limits.min_disk_tokens:
            return
        for key in self._index.chain(node.key):
            above = self._index.node(key)
            assert above is not None
            if "disk" not in above.tiers:
                self._add(above, Half.ROWS)
            is_last = key == node.key
            if is_last and with_end and _ends(above, "memory") > _ends(above, "disk"):
                self._add(above, Half.END)

    def _add(self, node: Node, half: Half) -> None:
        ends = _ends(node, "memory") if half is Half.END else NOTHING
        if not any(
            (write.key, write.half) == (node.key, half) and write.ends >= ends
            for write in self._under_way
        ):
            self._waiting[node.key, half] = None

    def hand_over(self, *, wait: bool = False) -> None:
        """Give the disk nodes that have arrived in host memory, a few files at a time; with `wait`
        all of them, however long their copies take.
        """
        num_files = len(self)
        while self._waiting and (wait or self.is_due):
            key, half = next(iter(self._waiting))
            node = self._index.node(key)
            if node is not None and self._can_follow(node, half):
                ticket = self._memory.ticket(key)
                if not (wait or ticket.is_done):
                    self._arriving = key
                    self._hear(ticket, partial(self._arrived, key))
                    break
                self._hand_over(node, half)
            del self._waiting[key, half]
        if len(self) < num_files:
            self._let_go()

    def _arrived(self, key: NodeKey) -> None:
        """The copies are over that were heard of; those of another node may not be."""
        if self._arriving == key:
            self._arriving = None
        self.hand_over()

    def written(self, key: NodeKey, written: Written) -> None:
        """What became of the first write of that half of the node that is under way."""
        half = written.half
        write = next(w for w in self._under_way if (w.key, w.half) == (key, half))
        self._under_way.remove(write)
        node = self._index.node(key)
        if written.again and not write.is_void:
            self._put_first(key, half)
        elif not written.is_there:
            self._drop_orphans()
        elif write.is_void or node is None or (half is Half.ROWS and not self._has_parent(node)):
            self._disk.remove([key])  # nobody may take it up, or could reach it
        elif half is Half.END and "disk" not in node.tiers:
            self._disk.remove_ends([key])
        elif half is Half.ROWS:
            self._hold(replace(node, file_bytes=written.num_bytes), _ends(node, "disk"))
            self._index.saved["disk"] += 1
        else:
            self._hold(replace(node, end_file_bytes=written.num_bytes), write.ends)

    def _hold(self, node: Node, ends: frozenset[Part]) -> None:
        """The disk has the node, and these parts of its end."""
        state_tiers = DISK if Part.STATE in ends else NOWHERE
        logits_tiers = DISK if Part.LOGITS in ends else NOWHERE
        self._index.hold(
            replace(node, tiers=DISK, state_tiers=state_tiers, logits_tiers=logits_tiers)
        )

    def forget(self, keys: Sequence[NodeKey]) -> None:
        """The index has let go of these: their files go too, and what was still to be written."""
        self.forgotten()
        self._disk.remove(keys)

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
            self._put_first(key, Half.END)
            self._put_first(key, Half.ROWS)

    def _put_first(self, key: NodeKey, half: Half) -> None:
        """Write the file before what waits already, which may continue it."""
        self._waiting.pop((key, half), None)
        self._waiting = {(key, half): None, **self._waiting}

    def _drop_orphans(self) -> None:
        """Nothing is written that continues what the disk does not have."""
        waiting, self._waiting = self._waiting, {}
        for key, half in waiting:
            node = self._index.node(key)
            needed = None if node is None else node.parent if half is Half.ROWS else key
            if node is not None and (
                (needed, Half.ROWS) in self._waiting or self._can_follow(node, half)
            ):
                self._waiting[key, half] = None

    def _can_follow(self, node: Node, half: Half) -> bool:
        """Whether memory has that half of the node, and the disk has what must be there before, or
        will have.
        """
        if half is Half.ROWS:
            return "memory" in node.tiers and self._has_parent(node)
        return bool(_ends(node, "memory")) and self._is_there(node)

    def _has_parent(self, node: Node) -> bool:
        """Whether what the node continues is on the disk, or will be before it."""
        parent = None if node.parent is None else self._index.node(node.parent)
        return node.parent is None or (parent is not None and self._is_there(parent))

    def _is_there(self, node: Node) -> bool:
        """Whether the disk has the node's rows, or is writing them."""
        is_coming = any((w.key, w.half) == (node.key, Half.ROWS) for w in self._under_way)
        return is_coming or "disk" in node.tiers

    def _hand_over(self, node: Node, half: Half) -> None:
        """Give the disk the file, if it has room beside all that it is writing already."""
        if half is Half.ROWS:
            ends = NOTHING
            tensors = self._memory.export(node.key, node.tokens, with_end=False)
        else:
            ends = _ends(node, "memory")
            tensors = self._memory.export_end(node.key)
        num_bytes = self._disk.file_bytes(tensors)
        if not self._make_room(num_bytes + sum(write.num_bytes for write in self._under_way)):
            log.debug("node %s is not written: no room within the budget", node.key.hex()[:16])
            return
        self._under_way.append(_Write(node.key, half, ends, num_bytes))
        self._disk.write(
            KeptNode(
                half=half,
                key=node.key,
                parent=node.parent,
                begin=node.begin,
                end=node.end,
                is_turn_end=node.is_turn_end,
                is_generated=node.is_generated,
                tensors=tensors,
            )
        )


def _ends(node: Node, tier: Tier) -> frozenset[Part]:
    """What of the node's end the tier holds."""
    tiers = {Part.STATE: node.state_tiers, Part.LOGITS: node.logits_tiers}
    return frozenset(part for part, held in tiers.items() if tier in held)


# What of a generation's nodes is worth a file, and of which the state goes with it. Pure
# choices. A state takes as many bytes as thousands of tokens, so not every one is written.


MIN_GUARDED_TOKENS = 1024  # fewer are soon run again
MAX_STATES_SHARE = 0.1  # of the bytes of the rows that states guard


def at_use(lease: Lease, num_tokens: int, *, recurrent: bool) -> bool:
    """Whether the end of a node that is taken up is to be on the disk too: one whose end is more
    than logits, and which few tokens do not give again. They are `num_tokens`, from the state
    before it that the disk has.
    """
    return lease.keep_prompt or (recurrent and num_tokens > MAX_OPENER_TOKENS)


def at_cut(lease: Lease, node: Node, *, recurrent: bool) -> bool | None:
    """Whether a node of the prompt that was just kept is written with its end; None where that is
    for what follows to say: the answer's end serves better than the prompt's.

    Written are the ends where other prompts part from this one, what the disk has without its end
    and was run again for that, and what guards a long prefill that may not come to its own end.
    """
    is_last = node.end == lease.num_prompt_tokens
    if is_last and lease.keep_prompt:
        return True
    if is_last and lease.is_opening(node):
        return None
    if not recurrent:
        return True
    is_again = "disk" in node.tiers - node.state_tiers and node.is_turn_end | is_last
    if is_last:
        return is_again or None
    is_parting = node.end in (lease.opener, *lease.forks, *lease.boundaries[:1])
    return is_parting or is_again or _guards(node, node.end - lease.safe_end)


def at_end(lease: Lease, tip: Node, *, recurrent: bool) -> bool:
    """Whether the last node that is kept of a generation is written with its end, though it was
    there before: nothing came after it, and the state is needed to go on from there.
    """
    return recurrent and not lease.is_opening(tip)


def _guards(node: Node, num_tokens: int) -> bool:
    """Whether the state at the node's end takes few bytes beside the rows of the `num_tokens`
    before it, which would be run again without it.
    """
    rows_bytes = num_tokens * node.num_bytes / len(node.tokens)
    return num_tokens >= MIN_GUARDED_TOKENS and node.state_bytes <= MAX_STATES_SHARE * rows_bytes
