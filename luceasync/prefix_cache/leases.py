"""All leases, and the nodes that must stay for them; other nodes are evicted to make room.

Does not know lanes or tokens: a lease lists the nodes that it needs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from luceasync.nodes import NodeKey
from luceasync.pipeline.paging import Paging
from luceasync.prefix_cache.conversations import Conversations
from luceasync.prefix_cache.index import NodeIndex, Retention
from luceasync.prefix_cache.lease import Lease
from luceasync.prefix_cache.read_in import ReadIn, nodes_of
from luceasync.prefix_cache.write_back import WriteBack


class Leases:
    """The leases of all generations that wait or run."""

    def __init__(
        self, index: NodeIndex, read_in: ReadIn, write_back: WriteBack, lanes: Paging
    ) -> None:
        """`lanes` may use memory for themselves."""
        self._lanes = lanes
        self._index = index
        self._read_in = read_in
        self._write_back = write_back
        self._leases: list[Lease] = []
        self._conversations = Conversations()
        self.words = self._conversations.words

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    def __repr__(self) -> str:
        return f"{len(self._leases)} leases"

    def add(self, lease: Lease) -> None:
        """Add a lease; its nodes stay from now on."""
        self._leases.append(lease)
        if (turn := lease.turn) is not None:
            lease.set_line(*self._conversations.line_of(turn.name, lease.sequence))

    def remove(self, lease: Lease) -> None:
        """Remove a lease; its nodes may be evicted. No-op if it was never added."""
        if lease in self._leases:
            self._leases.remove(lease)

    def waiting_for(self, key: NodeKey) -> list[Lease]:
        """The leases that wait for the node to arrive from the disk."""
        return [lease for lease in self._leases if key in lease.awaited]

    def end_turn(self, lease: Lease) -> None:
        """The lease's nodes are saved and on its path: its conversation continues there."""
        if (turn := lease.turn) is not None:
            ends = self._ends_of(lease)
            self._conversations.end_turn(turn, lease.sequence, ends, time.time())

    def _ends_of(self, lease: Lease) -> list[NodeKey]:
        """The nodes from which the turn after the lease's may continue."""
        turn = lease.turn
        num_tokens = lease.path_end if turn is None else turn.num_tokens
        return self._index.ends_of(lease.path, {num_tokens, *lease.places})

    # --- room ------------------------------------------------------------------------------------

    def make_room(self, num_bytes: int, spared: Sequence[NodeKey] = ()) -> bool:
        """Whether `num_bytes` fit into memory beside nodes in transit and what lanes use for
        themselves, after evicting nodes that no lease needs, but nothing at the ends `spared`."""
        coming = self._read_in.num_bytes + self._lanes.own_bytes
        return self._index.make_room(num_bytes + coming, self._in_use(spared))

    def make_hole(self, num_bytes: int, spared: Sequence[NodeKey] = ()) -> bool:
        """Evict more if free memory is fragmented; see NodeIndex.make_hole."""
        return self._index.make_hole(num_bytes, self._in_use(spared))

    def make_file_room(self, num_bytes: int) -> bool:
        """Whether files of `num_bytes` fit on the disk, after removing others."""
        return self._index.make_file_room(num_bytes, self._in_use())

    def shrink(self) -> None:
        """Evict what exceeds the budgets and is not needed."""
        self._index.shrink(self._in_use())

    @property
    def ends(self) -> set[NodeKey]:
        """Keys of the nodes that must keep what belongs to their end."""
        ends = {*self._write_back.ends, *self._read_in}
        ends.update(c.match.nodes[-1].key for c in self._leases if c.match and c.match.nodes)
        return ends

    def clear(self, keys: Collection[bytes] | None) -> None:
        """Drop these nodes, or all, except those that are needed and their ancestors."""
        needed = self._in_use()
        kept = {above for key in needed.nodes | needed.ends for above in self._index.chain(key)}
        asked = (node.key for node in self._index if keys is None or node.key in keys)
        self.drop([key for key in asked if key not in kept])
        self._index.refresh_status()

    def drop(self, keys: Sequence[NodeKey]) -> None:
        """Drop these nodes from every tier, needed or not."""
        for key in keys:
            self._index.drop(key, "memory")
            self._index.drop(key, "disk")
        self._write_back.drop(keys)

    def _in_use(self, spared: Sequence[NodeKey] = ()) -> Retention:
        """What must stay, including the ends `spared`."""
        keys = {*self._write_back, *self._read_in, *spared}
        for lease in self._leases:
            keys.update(lease.path[-1:])
            keys.update(lease.awaited)
            if lease.match is not None:
                keys.update(node.key for node in nodes_of(lease.match))
        in_use = {key for key in keys if key in self._index}
        running = [self._ends_of(lease) for lease in self._leases if lease.is_main]
        claims = [*running, *self._conversations.claims(time.time())]
        return Retention(in_use, self.ends | {*spared}, claims)
