"""Which paths of the tree go last when room is needed, because a conversation goes on there.

Pure: whose they are, and for how long they count, is for others to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from luceasync.node_words import NodeKey
from luceasync.prefix.node import Node, Tier


def granted(
    claims: Iterable[Sequence[NodeKey]], by_key: Mapping[NodeKey, Node], tier: Tier, most_bytes: int
) -> frozenset[NodeKey]:
    """The ends of those `claims`, the newest first, whose paths take half of `most_bytes` together
    at most; of the newest in any case. So others always have the rest.
    """
    ends: set[NodeKey] = set()
    counted: set[NodeKey] = set()
    num_bytes = 0
    for claim in claims:
        held = [key for key in claim if key in by_key]
        path = with_ancestors(held, by_key) - counted
        path_bytes = sum(by_key[key].bytes_in(tier) for key in path)
        if not held or (ends and 2 * (num_bytes + path_bytes) > most_bytes):
            continue
        ends.update(held)
        counted |= path
        num_bytes += path_bytes
    return frozenset(ends)


def with_ancestors(keys: Iterable[NodeKey], by_key: Mapping[NodeKey, Node]) -> set[NodeKey]:
    """These nodes, and all that they continue."""
    above: set[NodeKey] = set()
    for key in keys:
        at: NodeKey | None = key
        while at is not None and at in by_key and at not in above:
            above.add(at)
            at = by_key[at].parent
    return above
