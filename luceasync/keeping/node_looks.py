"""What of kept nodes is shown to people: where they hang, how large they are, how often used."""

from __future__ import annotations

import time
from collections.abc import Iterable
from heapq import nlargest

from luceasync.engine_look import NodeLook
from luceasync.prefix.node import TIERS, Node


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
