"""Which nodes are to be written to the disk, in which order, and the outcome of each write.

Owns the queue between memory and the disk. Does not know generations and evicts nothing: the prefix
cache requests the next file, waits for its copies and makes room for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from luceasync.disk_cache.codec import Half, NodePart
from luceasync.nodes import NodeKey
from luceasync.prefix_cache.disk_orders import DiskOrders, HalfNode, WriteReport
from luceasync.prefix_cache.index import Limits, NodeIndex
from luceasync.prefix_cache.lease import MAX_OPENER_TOKENS, Lease
from luceasync.prefix_cache.memory import MemoryNodes
from luceasync.prefix_tree.node import DISK, NOWHERE, Node, Tier

NO_PARTS: frozenset[NodePart] = frozenset()
MAX_WRITING = 2  # files that the disk is given at a time; the others wait by key


class PendingFile(NamedTuple):
    """Half a node that waits to be written."""

    key: NodeKey
    half: Half


@dataclass(frozen=True, slots=True)
class _FileWrite:
    """A file that the disk is writing, of at most `num_bytes`, with the parts `ends` of the node's
    end. `is_void`: the node was forgotten meanwhile; a node saved later under its key is not what
    the file holds."""

    file: PendingFile
    ends: frozenset[NodePart]
    num_bytes: int
    is_void: bool = False


class WriteBack:
    """Nodes on their way to files: parents before their children, rows before their end."""

    def __init__(
        self, index: NodeIndex, memory: MemoryNodes, disk: DiskOrders, limits: Limits
    ) -> None:
        self._index = index
        self._memory = memory
        self._disk = disk
        self._limits = limits
        self._waiting: dict[PendingFile, None] = {}  # written in this order
        self._under_way: list[_FileWrite] = []
        self._arriving: NodeKey | None = None  # a node whose copies out of its lane are awaited

    def __iter__(self) -> Iterator[NodeKey]:
        """Keys of the nodes that must stay in memory."""
        yield from (file.key for file in self._waiting)
        yield from (write.file.key for write in self._under_way)

    def __len__(self) -> int:
        """How many files are still to be written; may be called from any thread."""
        return len(self._waiting) + len(self._under_way)

    @property
    def num_bytes_under_way(self) -> int:
        """Size of the files that the disk is writing."""
        return sum(write.num_bytes for write in self._under_way)

    @property
    def ends(self) -> set[NodeKey]:
        """Keys of the nodes that must keep what belongs to their end."""
        return {file.key for file in self._waiting if file.half is Half.END}

    def safe_end(self, path: Iterable[Node]) -> int:
        """Where the last of these nodes ends whose state the disk has, or will have; 0: none."""
        under_way = (write.file for write in self._under_way)
        coming = {*self.ends, *(file.key for file in under_way if file.half is Half.END)}
        safe = (n.end for n in path if "disk" in n.state_tiers or n.key in coming)
        return max(safe, default=0)

    def add(self, node: Node, *, with_end: bool) -> None:
        """Queue the node, after those of its ancestors that the disk lacks."""
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
        file = PendingFile(node.key, half)
        ends = _ends(node, "memory") if half is Half.END else NO_PARTS
        if not any(write.file == file and write.ends >= ends for write in self._under_way):
            self._waiting[file] = None

    # --- to the disk -----------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the disk can accept a file, and the next one's node may have arrived in host
        memory."""
        has_room = len(self._under_way) < MAX_WRITING
        return has_room and any(file.key != self._arriving for file in islice(self._waiting, 1))

    def next_file(self, *, wait: bool = False) -> PendingFile | None:
        """The file to write now, None if none is due; with `wait`, regardless of writes in
        progress. It stays queued until `begin` or `cancel`. Files that cannot be written any more
        are dropped."""
        while self._waiting and (wait or self.is_due):
            file = next(iter(self._waiting))
            node = self._index.node(file.key)
            if node is not None and self._can_follow(node, file.half):
                return file
            del self._waiting[file]
        return None

    def await_arrival(self, key: NodeKey) -> None:
        """The next file's node is still being copied out of its lane."""
        self._arriving = key

    def arrived(self, key: NodeKey) -> None:
        """The copies are over. No-op if another node is awaited."""
        if self._arriving == key:
            self._arriving = None

    def export(self, file: PendingFile) -> HalfNode:
        """Export the file's contents; waits for copies out of the node's lane."""
        node = self._index.node(file.key)
        assert node is not None, "next_file comes first"
        if file.half is Half.ROWS:
            tensors = self._memory.export(node.key, node.tokens, with_end=False)
        else:
            tensors = self._memory.export_end(node.key)
        return HalfNode(
            half=file.half,
            key=node.key,
            parent=node.parent,
            begin=node.begin,
            end=node.end,
            is_turn_end=node.is_turn_end,
            is_generated=node.is_generated,
            tensors=tensors,
        )

    def begin(self, half_node: HalfNode, num_bytes: int) -> None:
        """Have the disk write what was exported, in a file of at most `num_bytes`."""
        file = PendingFile(half_node.key, half_node.half)
        node = self._index.node(file.key)
        assert node is not None, "next_file comes first"
        ends = _ends(node, "memory") if file.half is Half.END else NO_PARTS
        del self._waiting[file]
        self._under_way.append(_FileWrite(file, ends, num_bytes))
        self._disk.write(half_node)

    def cancel(self, file: PendingFile) -> None:
        """Do not write the file."""
        del self._waiting[file]

    # --- what became of it -----------------------------------------------------------------------

    def written(self, key: NodeKey, report: WriteReport) -> None:
        """Record the outcome of the first write in progress of that half of the node."""
        file = PendingFile(key, report.half)
        write = next(write for write in self._under_way if write.file == file)
        self._under_way.remove(write)
        node = self._index.node(key)
        is_rows = file.half is Half.ROWS
        if report.again and not write.is_void:
            self._put_first(file)
        elif not report.is_there:
            self._drop_orphans()
        elif write.is_void or node is None or (is_rows and not self._has_parent(node)):
            self._disk.remove([key])  # the node must not be used, or cannot be reached
        elif not is_rows and "disk" not in node.tiers:
            self._disk.remove_ends([key])
        elif is_rows:
            self._hold(replace(node, file_bytes=report.num_bytes), _ends(node, "disk"))
            self._index.saved["disk"] += 1
        else:
            self._hold(replace(node, end_file_bytes=report.num_bytes), write.ends)

    def _hold(self, node: Node, ends: frozenset[NodePart]) -> None:
        """Record in the index that the disk has the node, and these parts of its end."""
        state_tiers = DISK if NodePart.STATE in ends else NOWHERE
        logits_tiers = DISK if NodePart.LOGITS in ends else NOWHERE
        self._index.set_tiers(
            replace(node, tiers=DISK, state_tiers=state_tiers, logits_tiers=logits_tiers)
        )

    def drop(self, keys: Sequence[NodeKey]) -> None:
        """Remove the files of nodes that the index has dropped because their contents are wrong;
        files of them that are being written become void."""
        self._under_way = [
            replace(write, is_void=write.is_void or write.file.key not in self._index)
            for write in self._under_way
        ]
        self._disk.remove(keys)

    def mend(self, key: NodeKey) -> None:
        """Queue a node that the disk has lost, if it has children there."""
        node = self._index.node(key)
        if node is not None and any("disk" in n.tiers for n in self._index.children(key)):
            self._put_first(PendingFile(key, Half.END))
            self._put_first(PendingFile(key, Half.ROWS))

    def _put_first(self, file: PendingFile) -> None:
        """Write the file before all queued ones, which may continue it."""
        self._waiting.pop(file, None)
        self._waiting = {file: None, **self._waiting}

    def _drop_orphans(self) -> None:
        """Drop files that continue nodes which the disk will not have."""
        waiting, self._waiting = self._waiting, {}
        for file in waiting:
            node = self._index.node(file.key)
            if node is None:
                continue
            needed = node.parent if file.half is Half.ROWS else file.key
            is_queued = needed is not None and PendingFile(needed, Half.ROWS) in self._waiting
            if is_queued or self._can_follow(node, file.half):
                self._waiting[file] = None

    def _can_follow(self, node: Node, half: Half) -> bool:
        """Whether memory has that half of the node, and the disk has what must precede it, or is
        writing it."""
        if half is Half.ROWS:
            return "memory" in node.tiers and self._has_parent(node)
        return bool(_ends(node, "memory")) and self._is_there(node)

    def _has_parent(self, node: Node) -> bool:
        """Whether the node's parent is on the disk, or will be before it; the root needs none."""
        parent = None if node.parent is None else self._index.node(node.parent)
        return node.parent is None or (parent is not None and self._is_there(parent))

    def _is_there(self, node: Node) -> bool:
        """Whether the disk has the node's rows, or is writing them."""
        rows = PendingFile(node.key, Half.ROWS)
        return "disk" in node.tiers or any(write.file == rows for write in self._under_way)


def _ends(node: Node, tier: Tier) -> frozenset[NodePart]:
    """The parts of the node's end that the tier holds."""
    tiers = {NodePart.STATE: node.state_tiers, NodePart.LOGITS: node.logits_tiers}
    return frozenset(part for part, held in tiers.items() if tier in held)


# --- which nodes are worth a file --------------------------------------------------------------
# Pure choices. A state takes as many bytes as thousands of tokens, so not every one is written.

MIN_GUARDED_TOKENS = 1024  # fewer are quick to run again
MAX_STATES_SHARE = 0.1  # of the bytes of the rows that states guard


def writes_end_when_restored(lease: Lease, num_tokens: int, *, recurrent: bool) -> bool:
    """Whether the end of a restored node should be on the disk, too: if it is more than logits, and
    would take more than a few tokens to compute again. These are `num_tokens`, counted from the
    last state before it that the disk has."""
    return lease.keep_prompt or (recurrent and num_tokens > MAX_OPENER_TOKENS)


def writes_end_in_prompt(lease: Lease, node: Node, *, recurrent: bool) -> bool | None:
    """Whether a node of the prompt that was just saved is written with its end; None if that
    depends on what follows: the answer's end serves better than the prompt's.

    The following ends are written: those where other prompts part from this one, those that had to
    be run again because the disk lacks them, and those that guard a long prefill, which may be
    interrupted.
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


def writes_end_of_path(lease: Lease, tip: Node, *, recurrent: bool) -> bool:
    """Whether the last node of a generation that saved nothing after it is written with its end:
    the state is needed to continue from there."""
    return recurrent and not lease.is_opening(tip)


def _guards(node: Node, num_tokens: int) -> bool:
    """Whether the state at the node's end takes few bytes compared with the rows of the
    `num_tokens` before it, which would be run again without it."""
    rows_bytes = num_tokens * node.num_bytes / len(node.tokens)
    return num_tokens >= MIN_GUARDED_TOKENS and node.state_bytes <= MAX_STATES_SHARE * rows_bytes
