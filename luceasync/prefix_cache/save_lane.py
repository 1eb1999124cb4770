"""What a lane holds beyond its lease's path becomes a node in memory.

Owns nothing: nodes are held by NodeIndex, their tensors by MemoryNodes, the path by the lease. What
is worth keeping, and whether it is worth a file, is for others to say.
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
from luceasync.prefix_tree.node import NOWHERE, Node, Tier, node_key

log = logging.getLogger(__name__)

MEMORY: frozenset[Tier] = frozenset(("memory",))
# Simulated with nodes of 1 to 300 MB in 8 GB: of those that find no piece, 99 % then do.
MAX_TRIES = 6


@dataclass(frozen=True, slots=True)
class Kept:
    """What is to become a node: tokens up to `end`, and what is known there."""

    end: int
    is_turn_end: bool
    is_generated: bool = False
    logits: Tensor | None = None


class LaneToMemory:
    """Makes nodes out of lanes."""

    def __init__(
        self, index: NodeIndex, memory: MemoryNodes, leases: Leases, *, recurrent: bool
    ) -> None:
        self._index = index
        self._memory = memory
        self._leases = leases
        self._recurrent = recurrent

    def keep(self, lease: Lease, lane: int, kept: Kept) -> Node | None:
        """Make a node of what was added since the path's end; None where it cannot be kept."""
        lease.shorten(self._index.node)
        begin, end = lease.path_end, kept.end
        if end <= begin:
            return None
        tokens = lease.sequence[begin:end]
        key = node_key(tokens, lease.tenant, lease.path[-1] if lease.path else None)
        if self._is_held(key, kept):
            self._memory.lanes.kept(lane, key, Span(begin, end, with_state=self._recurrent))
        elif not self._save(lease, lane, kept, key, tokens):
            return None
        lease.kept_until(end, key)
        self._index.thin(lease.path, self._leases.ends)
        return self._index.node(key)

    def _is_held(self, key: NodeKey, kept: Kept) -> bool:
        """Whether memory has the node, and of its end all that there is to keep."""
        node = self._index.node(key)
        if node is None or "memory" not in node.tiers:
            return False
        has_state = not self._recurrent or "memory" in node.state_tiers
        return has_state and (kept.logits is None or "memory" in node.logits_tiers)

    def _save(self, lease: Lease, lane: int, kept: Kept, key: NodeKey, tokens: array[int]) -> bool:
        """Keep `tokens`, which end at `kept.end`, under `key`; whether there was room for them."""
        span = Span(lease.path_end, kept.end, with_state=self._recurrent)
        # Far before the prompt's end they would be of use only to who parts from it there.
        with_features = lease.num_prompt_tokens - span.end < self._memory.num_feature_tokens
        size = self._memory.size(
            span, with_logits=kept.logits is not None, with_features=with_features
        )
        save = partial(self._memory.save, lane, key, span, kept.logits, with_features=with_features)
        if not self.has_copied(save, size.span_bytes + size.end_bytes, lease.spared):
            log.debug("tokens [%d, %d) are not kept: no room", span.begin, span.end)
            self._index.forget(key, "memory")
            parent = lease.path[-1] if lease.path else None
            self._index.unkept.add((lease.tenant, parent), tokens)
            return False
        node = Node(
            key=key,
            parent=lease.path[-1] if lease.path else None,
            begin=span.begin,
            tokens=tokens,
            tiers=MEMORY,
            state_tiers=MEMORY if self._recurrent else NOWHERE,
            logits_tiers=NOWHERE if kept.logits is None else MEMORY,
            num_bytes=size.span_bytes,
            state_bytes=size.end_bytes,
            is_turn_end=kept.is_turn_end,
            is_generated=kept.is_generated,
            last_used_s=time.time(),
            saved_at_s=time.time(),
        )
        self._index.insert(lease.tenant, node)
        self._index.saved["memory"] += 1
        lease.made(key)
        return True

    def has_copied(
        self, save: Callable[[], object], num_bytes: int, spared: Sequence[NodeKey] = ()
    ) -> bool:
        """Save it; whether there was room for so many bytes, which what nobody needs makes: as much
        as it takes, and more where memory is free in pieces that are too small. Nothing goes that
        the ends `spared` need.
        """
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
