"""Every node that is held, by tenant and tier, within a budget for each tier. Engine thread only.

Owns the trees and says what goes when room is needed. Knows no lanes and no generations: what must
stay is told to it.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import nlargest

from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.nodes import MissReason, NodeKey
from luceasync.prefix_cache.disk_orders import DiskOrders
from luceasync.prefix_cache.memory import MemoryNodes
from luceasync.prefix_tree.eviction import MIN_AGE_S, Eviction, victims
from luceasync.prefix_tree.node import NOWHERE, TIERS, Node, Tier, node_key
from luceasync.prefix_tree.policy import granted, thin_states
from luceasync.prefix_tree.tree import Tree, parents_first
from luceasync.status import CacheStatus, NodeLook

# What the nodes that are held have to keep to: how large they may be, and which must stay.
# Values only.


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the prefix cache. `transit_bytes` of memory may be taken beyond `memory_bytes` by
    nodes on their way to or from the disk. `disk_bytes` None: there is no disk; prefixes of fewer
    than `min_disk_tokens` tokens are not worth a file.
    """

    memory_bytes: int
    transit_bytes: int = 0
    disk_bytes: int | None = None
    min_disk_tokens: int = 1
    interval_tokens: int = 2048

    @property
    def hold_any(self) -> bool:
        """Whether there is memory for nodes at all."""
        return self.memory_bytes + self.transit_bytes > 0


@dataclass(frozen=True, slots=True)
class Needed:
    """Keys of the nodes that must stay, with all that they continue, and of those of which what
    belongs to their end must stay. `claims`: ends that go last, each of one conversation's, the one
    that was used last first.
    """

    nodes: AbstractSet[NodeKey]
    ends: AbstractSet[NodeKey]
    claims: Sequence[Sequence[NodeKey]] = ()


# What of kept nodes is shown to people: where they hang, how large they are, how often used.


def newest(nodes: Iterable[Node], most: int) -> tuple[NodeLook, ...]:
    """At most so many of them, those that were used last."""
    now_s = time.time()
    return tuple(_look(node, now_s) for node in nlargest(most, nodes, key=_used_s))


def _look(node: Node, now_s: float) -> NodeLook:
    return NodeLook(
        key=node.key.hex(),
        parent=None if node.parent is None else node.parent.hex(),
        begin=node.begin,
        end=node.end,
        num_bytes={tier: node.bytes_in(tier) for tier in sorted(TIERS) if tier in node.tiers},
        has_state=node.has_state,
        hits=node.hits,
        idle_s=max(0.0, now_s - _used_s(node)),
    )


def _used_s(node: Node) -> float:
    return max(node.last_used_s, node.saved_at_s)


# Files of tenants that have not come yet: whose they are, only a tenant's key can tell. Owns
# these nodes and counts their bytes. Knows no tenant and removes no file.


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


# What memory had no room for: so that an answer can tell why no more of its prompt was found.
# Owns which places these are, the newest of them. Knows no tensors and no tree.


MAX_PLACES = 4096  # a quarter of a KiB each

Place = tuple[bytes, NodeKey | None]  # a tenant, and the node that would be gone on from


class Unkept:
    """The first tokens of what was refused or evicted, by place."""

    def __init__(self, max_places: int = MAX_PLACES) -> None:
        self._max_places = max_places
        self._begins: OrderedDict[Place, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, place: Place, tokens: array[int]) -> None:
        """There was no room for `tokens`, which went on from there."""
        self._begins[place] = tokens[:CHUNK_TOKENS]
        self._begins.move_to_end(place)
        if len(self._begins) > self._max_places:
            self._begins.popitem(last=False)

    def begins(self, place: Place, tokens: array[int]) -> bool:
        """Whether such tokens begin as `tokens` do, which go on from there now."""
        begin = self._begins.get(place)
        return begin is not None and tokens[: len(begin)] == begin


log = logging.getLogger(__name__)

SLACK = 0.02  # of a budget: what is freed beyond the need, so that eviction is rare
ORPHAN_AGE_S = 3600.0
NONE_YET: dict[str, int] = dict.fromkeys(sorted(TIERS), 0)


class NodeIndex:
    """The trees of all tenants, and the files of tenants that have not come yet."""

    def __init__(
        self, memory: MemoryNodes, disk: DiskOrders, limits: Limits, *, recurrent: bool
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._limits = limits
        self._recurrent = recurrent
        self._trees: dict[bytes, Tree] = {}
        self._tenants: dict[NodeKey, bytes] = {}  # of each node in a tree
        self._ownerless = OwnerlessFiles()
        self._strange: set[NodeKey] = set()  # those of them that no tenant so far can have named
        # With every key from the start: other threads read while they are counted up.
        self.saved = NONE_YET.copy()
        self.evicted = NONE_YET.copy()
        self.restored = NONE_YET.copy()
        self.restored_tokens = NONE_YET.copy()
        self.unkept = Unkept()
        self.missed = {reason.value: 0 for reason in MissReason}
        self._status = CacheStatus()

    def __iter__(self) -> Iterator[Node]:
        for tree in self._trees.values():
            yield from tree

    def __contains__(self, key: NodeKey) -> bool:
        return key in self._tenants

    def __repr__(self) -> str:
        return f"NodeIndex({len(self._trees)} tenants, {len(self._tenants)} nodes)"

    def tree(self, tenant: bytes) -> Tree:
        """The tenant's tree; its files are looked for when it comes for the first time."""
        if tenant not in self._trees:
            self._trees[tenant] = Tree()
            self._strange.difference_update(self._own_files(tenant, self._ownerless))
        return self._trees[tenant]

    def node(self, key: NodeKey) -> Node | None:
        """The node as it is now; None where it is gone."""
        tenant = self._tenants.get(key)
        return None if tenant is None else self._trees[tenant][key]

    def chain(self, key: NodeKey) -> list[NodeKey]:
        """Keys from the root to `key`, it included."""
        return [node.key for node in self._trees[self._tenants[key]].chain(key)]

    def children(self, key: NodeKey) -> list[Node]:
        """The nodes that continue `key`."""
        return self._trees[self._tenants[key]].children(key)

    def ends_of(self, path: Sequence[NodeKey], positions: AbstractSet[int]) -> list[NodeKey]:
        """Of the nodes of a path those that end at these positions, and the last."""
        nodes = [node for node in map(self.node, path) if node is not None]
        return [node.key for node in nodes if node.end in positions or node is nodes[-1]]

    def insert(self, tenant: bytes, node: Node) -> None:
        """Take in a node, or the tiers that it has gained. See Tree.insert."""
        self.tree(tenant).insert(node)
        self._tenants[node.key] = tenant

    def hold(self, node: Node) -> None:
        """Of a node that is here: its tiers hold what `node` says of them, and of its end no more.
        Raises ValueError where the tokens are others.
        """
        tree = self._trees[self._tenants[node.key]]
        tree.insert(node)
        for tier in node.tiers:
            tree.drop_state(node.key, tier)
        tree.insert(node)

    def num_bytes(self, tier: Tier) -> int:
        """What all tenants hold in `tier`."""
        owned = sum(tree.num_bytes(tier) for tree in self._trees.values())
        if tier == "memory":
            return owned
        return owned + self._ownerless.num_bytes

    def num_nodes(self, tier: Tier) -> int:
        """How many nodes of tenants that have come `tier` holds."""
        return sum(tree.num_nodes(tier) for tree in self._trees.values())

    def forget(self, key: NodeKey, tier: Tier) -> None:
        """The tier holds the node no longer. What cannot be reached without it goes too."""
        self._ownerless.discard(key)
        node = self.node(key)
        if node is None or tier not in node.tiers:
            return
        gone = self._trees[self._tenants[key]].remove(key, tier)
        if tier == "memory":
            self._memory.drop(key)
        for node in gone:
            del self._tenants[node.key]
            self._memory.drop(node.key)
        files = [n.key for n in gone if "disk" in n.tiers and (n.key != key or tier != "disk")]
        if files:
            self._disk.remove(files)

    def lost(self, keys: Iterable[NodeKey]) -> None:
        """Memory holds these no longer; what the disk has of them can be read again."""
        for key in keys:
            self.forget(key, "memory")
        self.refresh_status()

    def found(
        self, added: Iterable[Node], removed: Iterable[NodeKey], *, is_whole: bool = True
    ) -> None:
        """Files that are on the disk now, and keys of files that are no longer; `is_whole`: there
        are no others that could not be looked at.
        """
        for node in added:
            if node.key not in self._tenants:
                self._ownerless.add(node)
                continue
            try:
                self.hold(node)
            except ValueError as error:
                log.warning("a node file is not used: %s", error)
        for key in removed:
            self.forget(key, "disk")
        new = [node for node in self._ownerless if node.key not in self._strange]
        own = {key for tenant in self._trees for key in self._own_files(tenant, new)}
        self._strange = {node.key for node in self._ownerless} - own
        if is_whole:
            self._collect_orphans(time.time())

    def thin(self, path: Sequence[NodeKey], keep: AbstractSet[NodeKey]) -> None:
        """Let go of recurrent states on the way to the last node of `path`; where branches part
        they stay.
        """
        tree = self._trees[self._tenants[path[-1]]]
        branches = {key for key in path if len(tree.children(key)) > 1}
        for key in thin_states([tree[key] for key in path], branches | keep):
            if "memory" in tree[key].state_tiers:
                self._forget_end(key, "memory")

    def make_room(self, num_bytes: int, keep: Needed) -> bool:
        """Whether `num_bytes` fit into memory, after evicting what is worth least."""
        most = self._limits.memory_bytes + self._limits.transit_bytes
        return num_bytes <= most and self._evict("memory", most - num_bytes, keep)

    def make_hole(self, num_bytes: int, keep: Needed) -> bool:
        """Evict that much more from memory, whose free bytes lie in pieces; whether it could be
        done. Where less than a quarter is in use, the want of room has other reasons.
        """
        held = self.num_bytes("memory")
        if 4 * held < self._limits.memory_bytes:
            return False
        return self._evict("memory", max(0, held - num_bytes), keep)

    def make_file_room(self, num_bytes: int, keep: Needed) -> bool:
        """Whether files of `num_bytes` fit on the disk, after removing what is worth least: what
        was written just now only if it has to be. Nothing goes if that is not enough.
        """
        most = (self._limits.disk_bytes or 0) - num_bytes
        return most >= 0 and any(
            self._evict("disk", most, keep, min_age_s=min_age_s, in_part=False)
            for min_age_s in (MIN_AGE_S, 0.0)
        )

    def shrink(self, keep: Needed) -> None:
        """Evict what is beyond the budgets."""
        self._evict("memory", self._limits.memory_bytes, keep)
        if self._limits.disk_bytes is not None:
            self._evict("disk", self._limits.disk_bytes, keep, min_age_s=MIN_AGE_S)

    def _evict(
        self,
        tier: Tier,
        most_bytes: int,
        keep: Needed,
        min_age_s: float = 0.0,
        in_part: bool = True,
    ) -> bool:
        """Whether `tier` holds at most `most_bytes`, perhaps after an eviction."""
        over_bytes = self.num_bytes(tier) - most_bytes
        if over_bytes <= 0:
            return True
        nodes = [*self, *self._ownerless]
        budget_bytes = self._limits.memory_bytes if tier == "memory" else self._limits.disk_bytes
        by_key = {node.key: node for node in nodes} if keep.claims else {}
        eviction = victims(
            nodes,
            tier,
            over_bytes + int(SLACK * most_bytes),
            time.time(),
            recurrent=self._recurrent,
            protected=keep.nodes,
            protected_ends=keep.ends if self._recurrent else None,
            claimed=granted(keep.claims, by_key, tier, budget_bytes or 0),
            min_age_s=min_age_s,
        )
        is_enough = eviction.freed_bytes >= over_bytes
        if is_enough or in_part:
            self._drop(eviction, tier)
        return is_enough

    def _drop(self, eviction: Eviction, tier: Tier) -> None:
        for key in eviction.ends:
            self._forget_end(key, tier)
        for key in eviction.keys:
            node = self.node(key)
            if node is not None and node.tiers == {"memory"}:
                self.unkept.add((self._tenants[key], node.parent), node.tokens)
            self.forget(key, tier)
        if tier == "disk" and eviction.ends:
            self._disk.remove_ends(eviction.ends)
        if tier == "disk" and eviction.keys:
            self._disk.remove(eviction.keys)
        self.evicted[tier] += len(eviction.keys)

    def _forget_end(self, key: NodeKey, tier: Tier) -> None:
        """The tier holds the node without what belongs to its end."""
        if key in self._ownerless:
            self._ownerless.drop_end(key)
            return
        self._trees[self._tenants[key]].drop_state(key, tier)
        if tier == "memory":
            self._memory.drop(key, state_only=True)

    def _own_files(self, tenant: bytes, nodes: Iterable[Node]) -> list[NodeKey]:
        """Take in those of `nodes` that only this tenant's key can have named; the keys of all
        these, also of such as have no chain to the root yet.
        """
        found = [n for n in list(nodes) if node_key(n.tokens, tenant, n.parent) == n.key]
        rooted, _ = parents_first([*self._trees[tenant], *found])
        for node in rooted:
            if node.key not in self._ownerless:
                continue
            try:
                self.insert(tenant, node)
            except ValueError as error:
                log.warning("a node file is not used: %s", error)
            self._ownerless.discard(node.key)
        return [node.key for node in found]

    def _collect_orphans(self, now_s: float) -> None:
        """Remove old files whose parent is nowhere: nobody can reach them."""
        orphans = self._ownerless.orphans(self._tenants, now_s - ORPHAN_AGE_S)
        for key in orphans:
            self._ownerless.discard(key)
        if orphans:
            self._disk.remove(orphans)

    def refresh_status(self) -> None:
        """Make `status` say how things are now."""
        tiers = sorted(TIERS)
        self._status = CacheStatus(
            num_bytes={tier: self.num_bytes(tier) for tier in tiers},
            num_nodes={tier: self.num_nodes(tier) for tier in tiers},
            restored_total=dict(self.restored),
            restored_tokens_total=dict(self.restored_tokens),
            missed_total=dict(self.missed),
            saved_total=dict(self.saved),
            evicted_total=dict(self.evicted),
        )

    @property
    def status(self) -> CacheStatus:
        """How things were when a generation ended last; may be read from any thread."""
        return self._status
