"""Where nodes are cut, which of them keep their recurrent state, and which of them go.

Pure choices over nodes; whoever asks acts on the answer. Times come in as arguments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from luceasync.node_words import NodeKey
from luceasync.prefix.node import Node, Tier

HALF_LIFE_S = 6 * 3600.0
MIN_AGE_S = 60.0
NONE: frozenset[NodeKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Cut:
    """A node ends at position `end`; `is_turn_end`: it stands for a place where a turn ends."""

    end: int
    is_turn_end: bool


def plan_cuts(
    begin: int,
    num_tokens: int,
    boundaries: Iterable[int],
    *,
    interval_tokens: int,
    stops: Sequence[int],
    min_tokens: int = 1,
    firm: int | None = None,
) -> list[Cut]:
    """Where nodes end while tokens `[begin, num_tokens)` are run: at turn boundaries, every
    `interval_tokens` after one, and at the end of the run.

    A cut takes what is there and changes no number of the run, so it can only lie in `stops`, the
    positions where the state can be saved, ascending: the chunk ends of a prefill for a recurrent
    family, every position (a `range`) for attention, whose rows stay; `num_tokens` is one anyway.
    What is wanted elsewhere is cut at the last stop before it. Of two cuts nearer than `min_tokens`
    the later one is made; `firm`, a boundary that is a stop, is cut however near others are.
    """
    assert interval_tokens >= 1 and min_tokens >= 1
    if num_tokens <= begin:
        return []
    turn_ends = {
        b if b == num_tokens else _last_stop(stops, b)
        for b in boundaries
        if begin < b <= num_tokens
    }
    ends: list[int] = []
    last = begin
    for end in _spaced(begin, {*turn_ends, num_tokens}, min_tokens, firm):
        ends += [*_intervals(last, end, interval_tokens, stops), end]
        last = end
    return [Cut(end, end in turn_ends) for end in _spaced(begin, ends, min_tokens, firm)]


def _spaced(begin: int, ends: Collection[int], min_tokens: int, firm: int | None) -> list[int]:
    """Those of `ends` after `begin` that leave `min_tokens` to each other, ascending; the last one
    in any case. So is `firm`, which takes no room from others.
    """
    kept: list[int] = []
    for end in sorted(ends, reverse=True):
        is_apart = not kept or (kept[-1] - end >= min_tokens and end - begin >= min_tokens)
        if is_apart and end != firm:
            kept.append(end)
    return sorted([*kept, *(end for end in ends if end == firm)])


def _intervals(begin: int, end: int, interval_tokens: int, stops: Sequence[int]) -> list[int]:
    """Stops in (begin, end), each the last one within the interval or, failing that, the next."""
    found = []
    while begin + interval_tokens < end:
        stop = _last_stop(stops, begin + interval_tokens)
        if stop <= begin:
            after = bisect_right(stops, begin)
            stop = stops[after] if after < len(stops) else end
        if stop >= end:
            break
        found.append(stop)
        begin = stop
    return found


def _last_stop(stops: Sequence[int], position: int) -> int:
    """The last of `stops` up to `position`; 0 where there is none."""
    after = bisect_right(stops, position)
    return stops[after - 1] if after else 0


def thin_states(path: Sequence[Node], keep: AbstractSet[NodeKey] = NONE) -> list[NodeKey]:
    """Keys of those nodes of `path`, a chain from the root, whose recurrent state should go.

    Turn ends, the newest state and the keys in `keep` stay. Of the others the i-th, counted from 1,
    stays while it is less than 2 * (the largest power of two that divides i) from the tip: one for
    each power. Whoever parts from the path d nodes before its tip runs fewer than 2 * (d + 1) nodes
    again. It does not matter how often the path was thinned while it grew.
    """
    with_state = [i for i, node in enumerate(path, 1) if node.has_state]
    return [
        path[i - 1].key
        for i in with_state[:-1]
        if len(path) - i >= 2 * (i & -i)
        and not path[i - 1].is_turn_end
        and path[i - 1].key not in keep
    ]


@dataclass(frozen=True, slots=True)
class Eviction:
    """What to drop, in this order, what that frees, and what is missing all the same because the
    rest is protected.
    """

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
    half_life_s: float = HALF_LIFE_S,
    min_age_s: float = MIN_AGE_S,
) -> Eviction:
    """The nodes of least value that free `over_bytes` of `tier`; `nodes` are all that there are.

    Leaves go first, and a parent only once nothing needs it. The chains of `protected` keys stay,
    and so does what was saved less than `min_age_s` ago.
    """
    by_key = {node.key: node for node in nodes}
    kept = _with_ancestors(protected, by_key)
    crown = _Crown(by_key, tier)

    def entry(node: Node) -> tuple[float, float, NodeKey]:
        return (
            value_per_byte(node, by_key, tier, now_s, recurrent=recurrent, half_life_s=half_life_s),
            node.last_used_s,
            node.key,
        )

    def may_go(node: Node) -> bool:
        is_young = abs(now_s - node.saved_at_s) < min_age_s
        return crown.is_leaf(node) and node.key not in kept and not is_young

    heap = [entry(node) for node in by_key.values() if may_go(node)]
    heapify(heap)
    keys: list[NodeKey] = []
    freed_bytes = 0
    while heap and freed_bytes < over_bytes:
        node = by_key[heappop(heap)[2]]
        keys.append(node.key)
        freed_bytes += node.bytes_in(tier)
        parent = crown.drop(node)
        if parent is not None and may_go(parent):
            heappush(heap, entry(parent))
    return Eviction(tuple(keys), freed_bytes, max(0, over_bytes - freed_bytes))


def value_per_byte(
    node: Node,
    by_key: dict[NodeKey, Node],
    tier: Tier,
    now_s: float,
    *,
    recurrent: bool,
    half_life_s: float = HALF_LIFE_S,
) -> float:
    """Tokens that the node saves, by how often and how lately it was used, for each byte."""
    saved = _saved_tokens(node, by_key, tier) if recurrent else len(node.tokens)
    recency: float = 0.5 ** (max(0.0, now_s - node.last_used_s) / half_life_s)
    return saved * recency * (node.hits + 1) / max(1, node.bytes_in(tier))


def _saved_tokens(node: Node, by_key: dict[NodeKey, Node], tier: Tier) -> int:
    """Tokens that a recurrent model would run again without the state that `tier` holds of the
    node: none if it holds none, else those since the state before it.
    """
    if tier not in node.state_tiers:
        return 0
    before = None if node.parent is None else by_key.get(node.parent)
    while before is not None and tier not in before.state_tiers:
        before = None if before.parent is None else by_key.get(before.parent)
    return node.end - (0 if before is None else before.end)


def _with_ancestors(keys: AbstractSet[NodeKey], by_key: dict[NodeKey, Node]) -> set[NodeKey]:
    kept: set[NodeKey] = set()
    for key in keys:
        above: NodeKey | None = key
        while above is not None and above in by_key and above not in kept:
            kept.add(above)
            above = by_key[above].parent
    return kept


class _Crown:
    """How many nodes still need their parent in one tier, while leaves are dropped from it."""

    def __init__(self, by_key: dict[NodeKey, Node], tier: Tier) -> None:
        self._by_key = by_key
        self._tier: Tier = tier
        self._gone: set[NodeKey] = set()
        self._below = Counter(node.parent for node in by_key.values())
        self._below_here = Counter(n.parent for n in by_key.values() if tier in n.tiers)

    def is_leaf(self, node: Node) -> bool:
        """Whether the tier holds the node and nothing that continues it needs it there. A node that
        no other tier holds is needed by all that continue it, wherever they are.
        """
        is_last = len(node.tiers) == 1
        below = self._below if is_last else self._below_here
        return self._tier in node.tiers and node.key not in self._gone and not below[node.key]

    def drop(self, node: Node) -> Node | None:
        """Count the node as dropped; its parent."""
        self._gone.add(node.key)
        self._below_here[node.parent] -= 1
        if len(node.tiers) == 1:
            self._below[node.parent] -= 1
        return None if node.parent is None else self._by_key.get(node.parent)
