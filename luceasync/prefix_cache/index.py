"""Every node that is held, by tenant and tier, within a budget for each tier. Engine thread only.

Owns the trees and chooses what is evicted. Does not know lanes or generations: the caller says what
must stay.
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
from luceasync.status import CacheStatus, NodeStatus

log = logging.getLogger(__name__)

# Of the budget of a shared disk: reserved for what other servers write until the next scan.
HEADROOM = 0.05
SLACK = 0.02  # of a budget: freed beyond the need, so that evictions are rare
ORPHAN_AGE_S = 3600.0
MAX_EVICTION_MISSES = 4096  # a quarter of a KiB each
NONE_YET: dict[str, int] = dict.fromkeys(sorted(TIERS), 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the prefix cache. `transit_bytes` of memory may be taken beyond `memory_bytes` by
    nodes on their way to or from the disk. `disk_bytes` None: there is no disk; prefixes of fewer
    than `min_disk_tokens` tokens are not worth a file. `is_shared`: servers on other hosts use the
    disk too, and the one that enforces its budget makes room for what all of them write.
    `has_store`: a store with other servers' files is behind the disk."""

    memory_bytes: int
    transit_bytes: int = 0
    disk_bytes: int | None = None
    min_disk_tokens: int = 1
    interval_tokens: int = 2048
    is_shared: bool = False
    has_store: bool = False

    @property
    def hold_any(self) -> bool:
        """Whether there is memory for nodes at all."""
        return self.memory_bytes + self.transit_bytes > 0


@dataclass(frozen=True, slots=True)
class Retention:
    """Keys of the nodes that must stay, with their ancestors, and of those that must keep what
    belongs to their end. `claims`: ends that are evicted last, one for each conversation, most
    recently used first."""

    nodes: AbstractSet[NodeKey]
    ends: AbstractSet[NodeKey]
    claims: Sequence[Sequence[NodeKey]] = ()


class OwnerlessFiles:
    """Nodes on the disk, by key, of tenants that have sent no request yet: only the tenant's key
    shows to whom they belong."""

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
        """Add a node, replacing one with the same key."""
        self.discard(node.key)
        self._nodes[node.key] = node
        self.num_bytes += node.bytes_in("disk")

    def discard(self, key: NodeKey) -> None:
        """Forget the node, if it is here."""
        node = self._nodes.pop(key, None)
        if node is not None:
            self.num_bytes -= node.bytes_in("disk")

    def drop_end(self, key: NodeKey) -> None:
        """Leave only the rows of the node."""
        node = self._nodes[key]
        self.add(replace(node, state_tiers=NOWHERE, logits_tiers=NOWHERE))

    def orphans(self, owned: Container[NodeKey], saved_before_s: float) -> list[NodeKey]:
        """Keys of old nodes that cannot be reached: their parent is neither here nor owned."""
        return [
            node.key
            for node in self
            if node.parent is not None
            and node.parent not in self
            and node.parent not in owned
            and node.saved_at_s < saved_before_s
        ]


class OtherFiles:
    """Files in the directory that are not nodes of this model, mostly nodes of other models: when
    each was last used, and its size. They count towards the budget."""

    def __init__(self) -> None:
        self._files: list[tuple[float, int]] = []
        self._num_removals = 0
        self.num_bytes = 0

    def replace(self, files: Iterable[tuple[float, int]], num_removals: int) -> None:
        """Accept the result of a scan made after this many removals. Ignored while a removal is in
        progress, whose bytes are already subtracted: another scan follows it."""
        if num_removals < self._num_removals:
            return
        self._files = sorted(files)
        self.num_bytes = sum(size for _, size in self._files)

    def evictable_bytes(self, used_before_s: float) -> int:
        """The total size of files last used before `used_before_s`."""
        return sum(size for used_s, size in self._files if used_s <= used_before_s)

    def share_of(
        self, num_bytes: int, own: Iterable[tuple[float, int]], used_before_s: float
    ) -> int:
        """How much of `num_bytes` to free among these files, so that of them and `own` files the
        least recently used ones are removed."""
        here = [(used_s, size, True) for used_s, size in self._files if used_s <= used_before_s]
        both = sorted([*here, *((used_s, size, False) for used_s, size in own)]) if here else []
        share_bytes = 0
        for _, size, is_other in both:
            if num_bytes <= 0:
                break
            share_bytes += min(size, num_bytes) if is_other else 0
            num_bytes -= size
        return share_bytes

    def shed(self, num_bytes: int) -> None:
        """Subtract `num_bytes` of the least recently used files: one removal."""
        self._num_removals += 1
        self.num_bytes -= num_bytes
        while self._files and num_bytes > 0:
            used_s, size = self._files.pop(0)
            if size > num_bytes:
                self._files.insert(0, (used_s, size - num_bytes))
            num_bytes -= size


Continuation = tuple[bytes, NodeKey | None]  # a tenant, and the node that would be continued


class EvictionMisses:
    """The first tokens of prefixes that memory refused or evicted, so that an answer can report why
    no more of its prompt was found. Only the newest are remembered."""

    def __init__(self, max_entries: int = MAX_EVICTION_MISSES) -> None:
        self._max_entries = max_entries
        self._first_tokens: OrderedDict[Continuation, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._first_tokens)

    def add(self, at: Continuation, tokens: array[int]) -> None:
        """Record that there was no room for `tokens` after the node `at`."""
        self._first_tokens[at] = tokens[:CHUNK_TOKENS]
        self._first_tokens.move_to_end(at)
        if len(self._first_tokens) > self._max_entries:
            self._first_tokens.popitem(last=False)

    def matches(self, at: Continuation, tokens: array[int]) -> bool:
        """Whether `tokens` begin like tokens that had no room after the node `at`."""
        first = self._first_tokens.get(at)
        return first is not None and tokens[: len(first)] == first


class NodeIndex:
    """The trees of all tenants, and the files of tenants that have sent no request yet."""

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
        self._foreign: set[NodeKey] = set()  # ownerless files that belong to no known tenant
        self.others = OtherFiles()
        self.keeps_disk = not limits.is_shared  # if False, another server makes room on the disk
        # All keys exist from the start: other threads read the dict while it is updated.
        self.saved = NONE_YET.copy()
        self.evicted = NONE_YET.copy()
        self.restored = NONE_YET.copy()
        self.restored_tokens = NONE_YET.copy()
        self.eviction_misses = EvictionMisses()
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
        """The tenant's tree; the first call looks for its files."""
        if tenant not in self._trees:
            self._trees[tenant] = Tree()
            self._foreign.difference_update(self._own_files(tenant, self._ownerless))
        return self._trees[tenant]

    def node(self, key: NodeKey) -> Node | None:
        """The current version of the node; None if it is gone."""
        tenant = self._tenants.get(key)
        return None if tenant is None else self._trees[tenant][key]

    def chain(self, key: NodeKey) -> list[NodeKey]:
        """Keys from the root to `key`, inclusive."""
        return [node.key for node in self._trees[self._tenants[key]].chain(key)]

    def children(self, key: NodeKey) -> list[Node]:
        """The children of `key`."""
        return self._trees[self._tenants[key]].children(key)

    def ends_of(self, path: Sequence[NodeKey], positions: AbstractSet[int]) -> list[NodeKey]:
        """The nodes of a path that end at these positions, and the last node."""
        nodes = [node for node in map(self.node, path) if node is not None]
        return [node.key for node in nodes if node.end in positions or node is nodes[-1]]

    def insert(self, tenant: bytes, node: Node) -> None:
        """Add a node, or the tiers that it has gained; see Tree.insert."""
        self.tree(tenant).insert(node)
        self._tenants[node.key] = tenant

    def set_tiers(self, node: Node) -> None:
        """Overwrite the tiers of an existing node: those of `node` hold its rows, and exactly what
        `node` states of its end. Raises ValueError if the tokens differ."""
        tree = self._trees[self._tenants[node.key]]
        tree.insert(node)
        for tier in node.tiers:
            tree.drop_state(node.key, tier)
        tree.insert(node)

    def num_bytes(self, tier: Tier) -> int:
        """The bytes that all tenants hold in `tier`."""
        owned = sum(tree.num_bytes(tier) for tree in self._trees.values())
        if tier == "memory":
            return owned
        return owned + self._ownerless.num_bytes

    def num_nodes(self, tier: Tier) -> int:
        """How many nodes `tier` holds, without ownerless files."""
        return sum(tree.num_nodes(tier) for tree in self._trees.values())

    def drop(self, key: NodeKey, tier: Tier) -> None:
        """Drop the node from the tier, and every node that cannot be reached without it."""
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
        """Memory has lost these nodes; copies on the disk can be read again."""
        for key in keys:
            self.drop(key, "memory")
        self.refresh_status()

    def files_changed(
        self, added: Iterable[Node], removed: Iterable[NodeKey], *, is_whole: bool = True
    ) -> None:
        """Record files that are on the disk now, and keys of files that no longer are; `is_whole`:
        no file was left out because it could not be examined."""
        for node in added:
            if node.key not in self._tenants:
                self._ownerless.add(node)
                continue
            try:
                self.set_tiers(node)
            except ValueError as error:
                log.warning("a node file is ignored: %s", error)
        for key in removed:
            self.drop(key, "disk")
        new = [node for node in self._ownerless if node.key not in self._foreign]
        own = {key for tenant in self._trees for key in self._own_files(tenant, new)}
        self._foreign = {node.key for node in self._ownerless} - own
        if is_whole and self.keeps_disk:
            self._collect_orphans(time.time())

    def thin(self, path: Sequence[NodeKey], keep: AbstractSet[NodeKey]) -> None:
        """Drop recurrent states along `path` up to its last node, except where branches part."""
        tree = self._trees[self._tenants[path[-1]]]
        branches = {key for key in path if len(tree.children(key)) > 1}
        for key in thin_states([tree[key] for key in path], branches | keep):
            if "memory" in tree[key].state_tiers:
                self._drop_end(key, "memory")

    def make_room(self, num_bytes: int, keep: Retention) -> bool:
        """Whether `num_bytes` fit into memory, after evicting the least valuable nodes if
        necessary."""
        most = self._limits.memory_bytes + self._limits.transit_bytes
        return num_bytes <= most and self._evict("memory", most - num_bytes, keep)

    def make_hole(self, num_bytes: int, keep: Retention) -> bool:
        """Evict `num_bytes` more from memory whose free bytes are fragmented; returns whether that
        was possible. If less than a quarter of memory is in use, fragmentation is not the cause."""
        held = self.num_bytes("memory")
        if 4 * held < self._limits.memory_bytes:
            return False
        return self._evict("memory", max(0, held - num_bytes), keep)

    def make_file_room(self, num_bytes: int, keep: Retention) -> bool:
        """Whether files of `num_bytes` fit on the disk, after removing the least valuable ones;
        recently written ones are removed only if necessary. Nothing is removed if that is not
        enough, or if another server enforces the budget."""
        most = (self._limits.disk_bytes or 0) - num_bytes
        if not self.keeps_disk:
            return self.num_bytes("disk") + self.others.num_bytes <= most
        return most >= 0 and any(
            self._evict("disk", most, keep, min_age_s=min_age_s, in_part=False)
            for min_age_s in (MIN_AGE_S, 0.0)
        )

    def shrink(self, keep: Retention) -> None:
        """Evict what exceeds the budgets."""
        self._evict("memory", self._limits.memory_bytes, keep)
        if self._limits.disk_bytes is not None and self.keeps_disk:
            share = 1.0 - HEADROOM * self._limits.is_shared
            self._evict("disk", int(share * self._limits.disk_bytes), keep, min_age_s=MIN_AGE_S)

    def _evict(
        self,
        tier: Tier,
        most_bytes: int,
        keep: Retention,
        min_age_s: float = 0.0,
        in_part: bool = True,
    ) -> bool:
        """Whether `tier` holds at most `most_bytes`, after evictions if necessary. On the disk the
        files of all models count: between models the last use decides, within this one the value.
        """
        others = self.others if tier == "disk" else OtherFiles()
        over_bytes = self.num_bytes(tier) + others.num_bytes - most_bytes
        if over_bytes <= 0:
            return True
        now_s = time.time()
        nodes = [*self, *self._ownerless]
        want_bytes = over_bytes + int(SLACK * most_bytes)
        own = ((_used_s(node), node.bytes_in(tier)) for node in nodes if tier in node.tiers)
        of_others = others.share_of(want_bytes, own, now_s - min_age_s)
        budget_bytes = self._limits.memory_bytes if tier == "memory" else self._limits.disk_bytes
        by_key = {node.key: node for node in nodes} if keep.claims else {}
        eviction = victims(
            nodes,
            tier,
            want_bytes - of_others,
            now_s,
            recurrent=self._recurrent,
            protected=keep.nodes,
            protected_ends=keep.ends if self._recurrent else None,
            claimed=granted(keep.claims, by_key, tier, budget_bytes or 0),
            min_age_s=min_age_s,
        )
        of_others += max(0, want_bytes - of_others - eviction.freed_bytes)
        of_others = min(of_others, others.evictable_bytes(now_s - min_age_s))
        is_enough = eviction.freed_bytes + of_others >= over_bytes
        if is_enough or in_part:
            self._apply(eviction, tier)
            if of_others:
                others.shed(of_others)
                self._disk.remove_others(of_others)
        return is_enough

    def _apply(self, eviction: Eviction, tier: Tier) -> None:
        for key in eviction.ends:
            self._drop_end(key, tier)
        for key in eviction.keys:
            node = self.node(key)
            if node is not None and node.tiers == {"memory"}:
                self.eviction_misses.add((self._tenants[key], node.parent), node.tokens)
            self.drop(key, tier)
        if tier == "disk" and eviction.ends:
            self._disk.remove_ends(eviction.ends)
        if tier == "disk" and eviction.keys:
            self._disk.remove(eviction.keys)
        self.evicted[tier] += len(eviction.keys)

    def _drop_end(self, key: NodeKey, tier: Tier) -> None:
        """Drop what belongs to the node's end from the tier."""
        if key in self._ownerless:
            self._ownerless.drop_end(key)
            return
        self._trees[self._tenants[key]].drop_state(key, tier)
        if tier == "memory":
            self._memory.drop(key, state_only=True)

    def _own_files(self, tenant: bytes, nodes: Iterable[Node]) -> list[NodeKey]:
        """Add those of `nodes` that were named with this tenant's key; returns the keys of all of
        them, including those without a chain to the root yet."""
        found = [n for n in list(nodes) if node_key(n.tokens, tenant, n.parent) == n.key]
        rooted, _ = parents_first([*self._trees[tenant], *found])
        for node in rooted:
            if node.key not in self._ownerless:
                continue
            try:
                self.insert(tenant, node)
            except ValueError as error:
                log.warning("a node file is ignored: %s", error)
            self._ownerless.discard(node.key)
        return [node.key for node in found]

    def _collect_orphans(self, now_s: float) -> None:
        """Remove old files that cannot be reached: their parent is nowhere."""
        orphans = self._ownerless.orphans(self._tenants, now_s - ORPHAN_AGE_S)
        for key in orphans:
            self._ownerless.discard(key)
        if orphans:
            self._disk.remove(orphans)

    def refresh_status(self) -> None:
        """Bring `status` up to date."""
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
        """The state when a generation last ended; may be called from any thread."""
        return self._status


def newest(nodes: Iterable[Node], most: int) -> tuple[NodeStatus, ...]:
    """Details for display of at most `most` nodes, the most recently used ones."""
    now_s = time.time()
    return tuple(_described(node, now_s) for node in nlargest(most, nodes, key=_used_s))


def _described(node: Node, now_s: float) -> NodeStatus:
    return NodeStatus(
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
