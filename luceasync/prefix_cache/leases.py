"""Every lease under way, and the nodes that must stay for it; what else is held makes room.

Knows no lanes and no tokens: which nodes a lease is about stands in the lease.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from luceasync.nodes import NodeKey
from luceasync.pipeline.paging import Paging
from luceasync.prefix_cache.conversations import Conversations
from luceasync.prefix_cache.index import Needed, NodeIndex
from luceasync.prefix_cache.lease import Lease
from luceasync.prefix_cache.read_in import DiskToMemory, nodes_of
from luceasync.prefix_cache.write_back import MemoryToDisk


class Leases:
    """The leases of all generations that wait or run."""

    def __init__(
        self,
        index: NodeIndex,
        to_memory: DiskToMemory,
        to_disk: MemoryToDisk,
        lanes: Paging,
    ) -> None:
        """`lanes` may hold memory for themselves."""
        self._lanes = lanes
        self._index = index
        self._to_memory = to_memory
        self._to_disk = to_disk
        self._leases: list[Lease] = []
        self._conversations = Conversations()

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    def __repr__(self) -> str:
        return f"{len(self._leases)} leases"

    def add(self, lease: Lease) -> None:
        """What the lease is about stays from now on."""
        self._leases.append(lease)
        if lease.talk is not None:
            lease.stands(*self._conversations.standing(lease.talk.name, lease.sequence))

    def remove(self, lease: Lease) -> None:
        """What it was about may be evicted. Nothing, where it was never added."""
        if lease in self._leases:
            self._leases.remove(lease)

    def waiting_for(self, key: NodeKey) -> list[Lease]:
        """Those that wait for the node to come from the disk."""
        return [lease for lease in self._leases if key in lease.awaited]

    def answered(self, lease: Lease) -> None:
        """What is kept of it is on its path: its conversation goes on there."""
        if lease.talk is not None:
            name, num_tokens = lease.talk
            ends = self._ends_of(lease)
            self._conversations.ended(name, lease.sequence, num_tokens, ends, time.time())

    def _ends_of(self, lease: Lease) -> list[NodeKey]:
        """Where the next turn may go on from the lease's."""
        num_tokens = lease.talk.num_tokens if lease.talk else lease.path_end
        return self._index.ends_of(lease.path, {num_tokens, *lease.places})

    def make_room(self, num_bytes: int, spared: Sequence[NodeKey] = ()) -> bool:
        """Whether `num_bytes` fit into memory beside what is on its way there and what lanes hold
        for themselves, after evicting what nobody needs, and nothing at the ends `spared`.
        """
        coming = self._to_memory.num_bytes + self._lanes.own_bytes
        return self._index.make_room(num_bytes + coming, self._in_use(spared))

    def make_hole(self, num_bytes: int, spared: Sequence[NodeKey] = ()) -> bool:
        """See NodeIndex.make_hole."""
        return self._index.make_hole(num_bytes, self._in_use(spared))

    def make_file_room(self, num_bytes: int) -> bool:
        """See NodeIndex.make_file_room."""
        return self._index.make_file_room(num_bytes, self._in_use())

    def shrink(self) -> None:
        """Evict what is beyond the budgets and not needed."""
        self._index.shrink(self._in_use())

    @property
    def ends(self) -> set[NodeKey]:
        """Keys of the nodes that must keep what belongs to their end."""
        ends = {*self._to_disk.ends, *self._to_memory}
        ends.update(c.match.nodes[-1].key for c in self._leases if c.match and c.match.nodes)
        return ends

    def clear(self, keys: Collection[bytes] | None) -> None:
        """Let go of these nodes, or of all, but for those that somebody needs, and what these
        continue.
        """
        needed = self._in_use()
        kept = {above for key in needed.nodes | needed.ends for above in self._index.chain(key)}
        asked = (node.key for node in self._index if keys is None or node.key in keys)
        self.forget([key for key in asked if key not in kept])
        self._index.refresh_status()

    def forget(self, keys: Sequence[NodeKey]) -> None:
        """Let go of these nodes in every tier, whoever needs them."""
        for key in keys:
            self._index.forget(key, "memory")
            self._index.forget(key, "disk")
        self._to_disk.forget(keys)

    def _in_use(self, spared: Sequence[NodeKey] = ()) -> Needed:
        """What must stay, the ends `spared` too."""
        keys = {*self._to_disk, *self._to_memory, *spared}
        for lease in self._leases:
            keys.update(lease.path[-1:])
            keys.update(lease.awaited)
            if lease.match is not None:
                keys.update(node.key for node in nodes_of(lease.match))
        in_use = {key for key in keys if key in self._index}
        running = [self._ends_of(lease) for lease in self._leases if lease.is_main]
        claims = [*running, *self._conversations.claims(time.time())]
        return Needed(in_use, self.ends | {*spared}, claims)
