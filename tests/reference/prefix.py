"""The prefix tree by trying everything: the slow truth of luceasync.prefix_tree."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from luceasync.prefix_tree.eviction import value_per_byte
from luceasync.prefix_tree.node import Node


def chain(node: Node, by_key: dict[bytes, Node]) -> list[Node]:
    """The nodes from the root to `node`."""
    above = [] if node.parent is None else chain(by_key[node.parent], by_key)
    return [*above, node]


def longest(
    nodes: Iterable[Node],
    prompt: Sequence[int],
    *,
    recurrent: bool,
    chunk_tokens: int,
    tiers: AbstractSet[str],
) -> tuple[bool, int, int]:
    """Exact, usable tokens, shared tokens: the best over every place in every node."""
    by_key = {node.key: node for node in nodes}
    best, num_shared = (False, 0), 0
    for node in by_key.values():
        path = chain(node, by_key)
        if not all(n.tiers & tiers for n in path):
            continue
        tokens = [token for n in path for token in n.tokens]
        for end in range(node.begin + 1, node.end + 1):
            if tokens[:end] == list(prompt[:end]):
                num_shared = max(num_shared, end)
                best = max(best, usable(node, end, prompt, recurrent, chunk_tokens, tiers))
    return *best, num_shared


def usable(node, end, prompt, recurrent, chunk_tokens, tiers) -> tuple[bool, int]:
    """Exact and usable tokens of the chain up to position `end` in `node`."""
    is_whole = end == node.end
    can_go_on = node.state_tiers & tiers if recurrent else is_whole or end % chunk_tokens == 0
    if not can_go_on or (recurrent and not is_whole):
        return False, 0
    if end == len(prompt):
        exact = bool(is_whole and node.logits_tiers & tiers)
        return exact, end if exact else 0
    return False, end


def evict(nodes, tier, over_bytes, now_s, *, recurrent, protected, min_age_s) -> list[bytes]:
    """Drop the worst node that may go, look at all of them again, until enough is freed."""
    left = {node.key: node for node in nodes}
    every = dict(left)
    kept = {n.key for key in protected if key in left for n in chain(left[key], left)}
    gone: list[bytes] = []
    while over_bytes > 0:
        free = [
            node
            for node in every.values()
            if tier in node.tiers and node.key not in gone and node.key not in kept
            if abs(now_s - node.saved_at_s) >= min_age_s and is_leaf(node, left, tier, gone)
        ]
        if not free:
            break
        worst = min(
            free,
            key=lambda n: (
                value_per_byte(n, every, tier, now_s, recurrent=recurrent),
                n.last_used_s,
                n.key,
            ),
        )
        gone.append(worst.key)
        over_bytes -= worst.bytes_in(tier)
        if worst.tiers == {tier}:
            del left[worst.key]
    return gone


def is_leaf(node, left, tier, gone) -> bool:
    """Whether nothing that is left needs `node` in `tier`."""
    below = [n for n in left.values() if n.parent == node.key]
    here = [n for n in below if tier in n.tiers and n.key not in gone]
    return not (here if len(node.tiers) > 1 else below)
