"""Which nodes are evicted when room is needed, and which recurrent states before them.

Pure choices over nodes; the caller acts on them. Times are arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from luceasync.nodes import NodeKey
from luceasync.prefix_tree.node import Node, Tier
from luceasync.prefix_tree.policy import with_ancestors

HALF_LIFE_S = 6 * 3600.0
MIN_AGE_S = 60.0
FEW_TOKENS = 64  # quick to run again: a leaf that saves fewer tokens is worth no more than a state
NONE: frozenset[NodeKey] = frozenset()
LAST = 3  # the rank of claimed nodes


@dataclass(frozen=True, slots=True)
class Eviction:
    """The nodes whose ends to drop, then the nodes to drop, in this order; the bytes that this
    frees, and the bytes still missing because the rest is protected."""

    ends: tuple[NodeKey, ...]
    keys: tuple[NodeKey, ...]
    freed_bytes: int
    missing_bytes: int


def victims(
    nodes: Iterable[Node],
    tier: Tier,
    over_bytes: int,
    now_s: float,
    *,
    recurrent: bool,
    protected: AbstractSet[NodeKey] = NONE,
    protected_ends: AbstractSet[NodeKey] | None = None,
    claimed: AbstractSet[NodeKey] = NONE,
    half_life_s: float = HALF_LIFE_S,
    min_age_s: float = MIN_AGE_S,
) -> Eviction:
    """The least valuable nodes and states that free `over_bytes` of `tier`; `nodes`: all nodes.

    Leaves are evicted, and a parent only once nothing needs it. Chains of `protected` keys stay,
    and so do nodes that were saved less than `min_age_s` ago.

    With `protected_ends` None, nodes are evicted as a whole. Otherwise recurrent states may be
    evicted without their rows, even on protected chains, except those of these keys. States on the
    way to a single node go first, least recently used: continuing from the tip needs none of them.
    Those where branches part, or where a protected chain ends, go last, but before anything new is
    refused.

    `claimed`: ends at which conversations go on. Their states, and the nodes of their chains, go
    after all others, least recently used first.
    """
    order = _EvictionOrder(
        {node.key: node for node in nodes}, tier, now_s, recurrent, half_life_s, min_age_s
    )
    order.protect(protected, protected_ends, claimed)
    return order.until_freed(over_bytes)


_Entry = tuple[int, float, float, NodeKey, bool]  # rank, two values, key, whether only the end


class _EvictionOrder:
    """The order of eviction, least valuable first. Values change as others are evicted, but only
    rise: an entry is evaluated again when its turn comes."""

    def __init__(
        self,
        by_key: dict[NodeKey, Node],
        tier: Tier,
        now_s: float,
        recurrent: bool,
        half_life_s: float,
        min_age_s: float,
    ) -> None:
        self._by_key = by_key
        self._tier: Tier = tier
        self._now_s = now_s
        self._recurrent = recurrent
        self._half_life_s = half_life_s
        self._min_age_s = min_age_s
        self._children = _ChildCounts(by_key, tier)
        self._kept: set[NodeKey] = set()
        self._kept_ends: AbstractSet[NodeKey] | None = None
        self._claimed: set[NodeKey] = set()
        self._claimed_ends: AbstractSet[NodeKey] = NONE

    def protect(
        self,
        keys: AbstractSet[NodeKey],
        ends: AbstractSet[NodeKey] | None,
        claimed: AbstractSet[NodeKey],
    ) -> None:
        """See victims."""
        self._kept, self._kept_ends = with_ancestors(keys, self._by_key), ends
        self._claimed, self._claimed_ends = with_ancestors(claimed, self._by_key), claimed

    def until_freed(self, over_bytes: int) -> Eviction:
        """Evict until `over_bytes` are free."""
        heap = [entry for node in self._by_key.values() for entry in self._entries(node)]
        heapify(heap)
        ends: list[NodeKey] = []
        keys: list[NodeKey] = []
        freed_bytes = 0
        while heap and freed_bytes < over_bytes:
            entry = heappop(heap)
            node, is_end = self._by_key[entry[3]], entry[4]
            now = self._end_entry(node) if is_end else self._entry(node)
            if now != entry:
                if now is not None:
                    heappush(heap, now)
                continue
            (ends if is_end else keys).append(node.key)
            if is_end:
                freed_bytes += self._drop_end(node)
                continue
            freed_bytes += node.bytes_in(self._tier)
            parent = self._children.drop(node)
            for entry in () if parent is None else self._entries(parent):
                heappush(heap, entry)
        missing_bytes = max(0, over_bytes - freed_bytes)
        return Eviction(tuple(ends), tuple(keys), freed_bytes, missing_bytes)

    def _entries(self, node: Node) -> list[_Entry]:
        return [entry for entry in (self._entry(node), self._end_entry(node)) if entry is not None]

    def _entry(self, node: Node) -> _Entry | None:
        """The entry of the whole node; None if the node must stay."""
        if not self._children.is_leaf(node) or node.key in self._kept or self._is_young(node):
            return None
        saved = _saved_tokens(node, self._by_key, self._tier) if self._recurrent else 0
        if node.key in self._claimed:
            return LAST, node.last_used_s, saved, node.key, False
        if self._kept_ends is not None and 0 < saved < FEW_TOKENS:
            return 0, node.last_used_s, saved, node.key, False
        value = value_per_byte(
            node,
            self._by_key,
            self._tier,
            self._now_s,
            recurrent=self._recurrent,
            half_life_s=self._half_life_s,
        )
        return 1, value, node.last_used_s, node.key, False

    def _end_entry(self, node: Node) -> _Entry | None:
        """The entry of what belongs to the node's end; None if there is nothing, if it must stay,
        or if it goes with the node."""
        if self._kept_ends is None or node.key in self._kept_ends:
            return None
        if self._tier not in node.state_tiers or self._children.is_gone(node):
            return None
        if self._is_young(node) or not node.end_bytes_in(self._tier):  # one file holds both
            return None
        if self._children.is_leaf(node) and node.key not in self._kept:
            return None
        saved = _saved_tokens(node, self._by_key, self._tier)
        if node.key in self._claimed_ends:
            return LAST, node.last_used_s, saved, node.key, True
        if self._tier == "disk" and self._children.is_before_tip(node):
            # At the opening of the answer, where the next turn begins unless it continues the tip:
            # worth as much as a tip. In memory the opening is a branch there.
            recency = 0.5 ** (max(0.0, self._now_s - node.last_used_s) / self._half_life_s)
            value = saved * recency * (node.hits + 1) / node.end_bytes_in(self._tier)
            return 1, value, node.last_used_s, node.key, True
        rank = 0 if self._children.num_below(node) == 1 else 2
        return rank, node.last_used_s, saved, node.key, True

    def _is_young(self, node: Node) -> bool:
        return abs(self._now_s - node.saved_at_s) < self._min_age_s

    def _drop_end(self, node: Node) -> int:
        """Mark the node's end as dropped; returns its bytes."""
        gone = frozenset((self._tier,))
        left = replace(
            node, state_tiers=node.state_tiers - gone, logits_tiers=node.logits_tiers - gone
        )
        self._by_key[node.key] = left
        return node.bytes_in(self._tier) - left.bytes_in(self._tier)


def value_per_byte(
    node: Node,
    by_key: dict[NodeKey, Node],
    tier: Tier,
    now_s: float,
    *,
    recurrent: bool,
    half_life_s: float = HALF_LIFE_S,
) -> float:
    """Tokens that the node saves per byte, weighted by how often and how recently it was used."""
    saved = _saved_tokens(node, by_key, tier) if recurrent else len(node.tokens)
    recency: float = 0.5 ** (max(0.0, now_s - node.last_used_s) / half_life_s)
    return saved * recency * (node.hits + 1) / max(1, node.bytes_in(tier))


def _saved_tokens(node: Node, by_key: dict[NodeKey, Node], tier: Tier) -> int:
    """Tokens that a recurrent model would have to run again without the state in `tier`: 0 if there
    is none, otherwise those since the state before it."""
    if tier not in node.state_tiers:
        return 0
    before = None if node.parent is None else by_key.get(node.parent)
    while before is not None and tier not in before.state_tiers:
        before = None if before.parent is None else by_key.get(before.parent)
    return node.end - (0 if before is None else before.end)


class _ChildCounts:
    """How many children still need each node in one tier, while leaves are dropped from it."""

    def __init__(self, by_key: dict[NodeKey, Node], tier: Tier) -> None:
        self._by_key = by_key
        self._tier: Tier = tier
        self._gone: set[NodeKey] = set()
        self._below = Counter(node.parent for node in by_key.values())
        self._below_here = Counter(n.parent for n in by_key.values() if tier in n.tiers)
        self._before_leaves = Counter(
            node.parent
            for node in by_key.values()
            if tier in node.tiers and not self._below_here[node.key]
        )

    def is_leaf(self, node: Node) -> bool:
        """Whether the tier holds the node and no child needs it there. A node that is in no other
        tier is needed by all of its children, whichever tier holds them."""
        is_last = len(node.tiers) == 1
        below = self._below if is_last else self._below_here
        return self._tier in node.tiers and node.key not in self._gone and not below[node.key]

    def is_gone(self, node: Node) -> bool:
        """Whether the node was dropped."""
        return node.key in self._gone

    def num_below(self, node: Node) -> int:
        """How many children the node has in the tier."""
        return self._below_here[node.key]

    def is_before_tip(self, node: Node) -> bool:
        """Whether its only child in the tier is a leaf."""
        return self._before_leaves[node.key] == self._below_here[node.key] == 1

    def drop(self, node: Node) -> Node | None:
        """Mark the node as dropped; returns its parent."""
        self._gone.add(node.key)
        self._below_here[node.parent] -= 1
        self._before_leaves[node.parent] -= 1
        parent = None if node.parent is None else self._by_key.get(node.parent)
        if parent is not None and not self._below_here[node.parent]:
            self._before_leaves[parent.parent] += 1
        if len(node.tiers) == 1:
            self._below[node.parent] -= 1
        return parent
