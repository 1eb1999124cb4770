"""Turns what a lane holds beyond its lease's path into a node in memory.

Owns nothing: NodeIndex holds nodes, MemoryNodes their tensors, the lease its path. Others decide
what is worth saving, and whether it is worth a file.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from luceasync.host_cache.nodes import Span
from luceasync.nodes import NodeKey
from luceasync.prefix_cache.index import NodeIndex
from luceasync.prefix_cache.lease import Lease
from luceasync.prefix_cache.leases import Leases
from luceasync.prefix_cache.memory import MemoryNodes
from luceasync.prefix_tree.node import MEMORY, NOWHERE, Node, node_key

log = logging.getLogger(__name__)

# In a simulation with nodes of 1 to 300 MB in 8 GB, 99 % of those that found no free range at first
# found one within so many tries.
MAX_TRIES = 6


@dataclass(frozen=True, slots=True)
class SavePoint:
    """Where a node should end, and what is known there. `logits`: float32 [vocab]."""

    end: int
    is_turn_end: bool
    is_generated: bool = False
    logits: Tensor | None = None


class LaneSaver:
    """Saves parts of lanes as nodes."""

    def __init__(
        self, index: NodeIndex, memory: MemoryNodes, leases: Leases, *, recurrent: bool
    ) -> None:
        self._index = index
        self._memory = memory
        self._leases = leases
        self._recurrent = recurrent

    def save(self, lease: Lease, lane: int, point: SavePoint) -> Node | None:
        """Save what was added since the path's end as a node; None without tokens or room."""
        lease.shorten_path(self._index.node)
        begin, end = lease.path_end, point.end
        if end <= begin:
            return None
        tokens = lease.sequence[begin:end]
        key = node_key(tokens, lease.tenant, lease.path[-1] if lease.path else None)
        if self._is_held(key, point):
            self._memory.lanes.node_saved(lane, key, Span(begin, end, with_state=self._recurrent))
        elif not self._save(lease, lane, point, key, tokens):
            return None
        lease.extend_path(end, key)
        self._index.thin(lease.path, self._leases.ends)
        return self._index.node(key)

    def _is_held(self, key: NodeKey, point: SavePoint) -> bool:
        """Whether memory has the node, and all parts of its end that could be saved."""
        node = self._index.node(key)
        if node is None or "memory" not in node.tiers:
            return False
        has_state = not self._recurrent or "memory" in node.state_tiers
        return has_state and (point.logits is None or "memory" in node.logits_tiers)

    def _save(
        self, lease: Lease, lane: int, point: SavePoint, key: NodeKey, tokens: array[int]
    ) -> bool:
        """Save `tokens`, which end at the point, under `key`; whether there was room for them."""
        span = Span(lease.path_end, point.end, with_state=self._recurrent)
        # Far before the prompt's end, features would serve only prompts that part from it there.
        with_features = lease.num_prompt_tokens - span.end < self._memory.num_feature_tokens
        size = self._memory.size(
            span, with_logits=point.logits is not None, with_features=with_features
        )
        save = partial(
            self._memory.save, lane, key, span, point.logits, with_features=with_features
        )
        parent = lease.path[-1] if lease.path else None
        if not self.try_save(save, size.span_bytes + size.end_bytes, lease.spared):
            log.debug("tokens [%d, %d) are not saved: no room", span.begin, span.end)
            self._index.drop(key, "memory")
            self._index.eviction_misses.add((lease.tenant, parent), tokens)
            return False
        node = Node(
            key=key,
            parent=parent,
            begin=span.begin,
            tokens=tokens,
            tiers=MEMORY,
            state_tiers=MEMORY if self._recurrent else NOWHERE,
            logits_tiers=NOWHERE if point.logits is None else MEMORY,
            num_bytes=size.span_bytes,
            state_bytes=size.end_bytes,
            is_turn_end=point.is_turn_end,
            is_generated=point.is_generated,
            last_used_s=time.time(),
            saved_at_s=time.time(),
        )
        self._index.insert(lease.tenant, node)
        self._index.saved["memory"] += 1
        lease.add_saved(key)
        return True

    def try_save(
        self, save: Callable[[], object], num_bytes: int, spared: Sequence[NodeKey] = ()
    ) -> bool:
        """Call `save`, which needs `num_bytes` and raises MemoryError; returns whether it
        succeeded. Nodes that no lease needs are evicted to make room, more of them if free memory
        is fragmented, but none that the ends `spared` need."""
        has_room = self._leases.make_room(num_bytes, spared)
        for _ in range(MAX_TRIES):
            if not has_room:
                return False
            try:
                save()
                return True
            except MemoryError:
                has_room = self._leases.make_hole(num_bytes, spared)
        return False
