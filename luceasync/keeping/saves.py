"""What a lane holds beyond its claim's path becomes a node in memory.

Owns nothing: nodes are held by Holdings, their tensors by StateMover, the path by the claim. What
is worth keeping, and whether it is worth a file, is for others to say.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from luceasync.hoststore.node_store import Span
from luceasync.keeping.claim import Claim
from luceasync.keeping.claims import Claims
from luceasync.keeping.holdings import Holdings
from luceasync.keeping.state import StateMover
from luceasync.prefix.keys import node_key
from luceasync.prefix.node import NOWHERE, Node, Tier

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


class Saves:
    """Makes nodes out of lanes."""

    def __init__(
        self, holdings: Holdings, mover: StateMover, claims: Claims, *, recurrent: bool
    ) -> None:
        self._holdings = holdings
        self._mover = mover
        self._claims = claims
        self._recurrent = recurrent

    def keep(self, claim: Claim, lane: int, kept: Kept) -> bytes | None:
        """Make a node of what was added since the path's end; None where it cannot be kept."""
        self._shorten(claim)
        begin, end = claim.path_end, kept.end
        if end <= begin:
            return None
        tokens = claim.sequence[begin:end]
        key = node_key(tokens, claim.tenant, claim.path[-1] if claim.path else None)
        if not self._is_held(key, kept) and not self._save(claim, lane, kept, key, tokens):
            return None
        claim.path.append(key)
        claim.path_end = end
        self._holdings.thin(claim.path, self._claims.ends)
        return key

    def _is_held(self, key: bytes, kept: Kept) -> bool:
        """Whether memory has the node, and of its end all that there is to keep."""
        node = self._holdings.node(key)
        if node is None or "memory" not in node.tiers:
            return False
        has_state = not self._recurrent or "memory" in node.state_tiers
        return has_state and (kept.logits is None or "memory" in node.logits_tiers)

    def _save(self, claim: Claim, lane: int, kept: Kept, key: bytes, tokens: array[int]) -> bool:
        """Keep `tokens`, which end at `kept.end`, under `key`; whether there was room for them."""
        span = Span(claim.path_end, kept.end, with_state=self._recurrent)
        # Far before the prompt's end they would be of use only to who parts from it there.
        with_features = claim.num_prompt_tokens - span.end < self._mover.num_feature_tokens
        size = self._mover.size(
            span, with_logits=kept.logits is not None, with_features=with_features
        )
        save = partial(
            self._mover.save, lane, key.hex(), span, kept.logits, with_features=with_features
        )
        if not self._has_copied(save, size.span_bytes + size.end_bytes):
            log.debug("tokens [%d, %d) are not kept: no room", span.begin, span.end)
            self._holdings.forget(key, "memory")
            return False
        node = Node(
            key=key,
            parent=claim.path[-1] if claim.path else None,
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
        self._holdings.insert(claim.tenant, node)
        self._holdings.saved["memory"] += 1
        claim.kept.append(key)
        return True

    def _has_copied(self, save: Callable[[], None], num_bytes: int) -> bool:
        """Whether there was room, which what nobody needs makes: as much as it takes, and more
        where memory is free in pieces that are too small.
        """
        has_room = self._claims.make_room(num_bytes)
        for _ in range(MAX_TRIES):
            if not has_room:
                return False
            try:
                save()
                return True
            except MemoryError:
                has_room = self._claims.make_hole(num_bytes)
        return False

    def _shorten(self, claim: Claim) -> None:
        """Files that nobody has read yet may go at any time, and with them the path's end: what
        they held is kept again, the lane has it all.
        """
        while claim.path and claim.path[-1] not in self._holdings:
            claim.path.pop()
        last = self._holdings.node(claim.path[-1]) if claim.path else None
        claim.path_end = 0 if last is None else last.end
