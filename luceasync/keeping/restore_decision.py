"""Where it is decided what of a prompt is restored, from memory or from the disk, or run again.

Owns the rates that were seen. Reads nothing itself: what has to come from the disk is ordered by
DiskToMemory.
"""

from __future__ import annotations

from dataclasses import replace

from luceasync.keeping.disk_to_memory import DiskToMemory
from luceasync.keeping.lease import Lease, Look
from luceasync.keeping.leases import Leases
from luceasync.keeping.node_index import NodeIndex
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.node_words import MissReason
from luceasync.prefix.cost import RateName, Rates, patience_s, restore_or_prefill
from luceasync.prefix.node import TIERS, Match, Node, Tier

MEMORY: frozenset[Tier] = frozenset(("memory",))


class RestoreDecision:
    """What a lease takes up. Engine thread only."""

    def __init__(
        self, index: NodeIndex, to_memory: DiskToMemory, leases: Leases, *, recurrent: bool
    ) -> None:
        self._index = index
        self._to_memory = to_memory
        self._leases = leases
        self._recurrent = recurrent
        self.rates = Rates()

    def observed(self, rate: RateName, amount: int, elapsed_s: float) -> None:
        """How long something took."""
        self.rates = self.rates.observed(rate, amount, elapsed_s)

    def longest(self, lease: Lease) -> Match:
        """The most of the prompt that could be taken up now: from the disk too, unless that could
        not give what this lease has asked for.
        """
        tree, tiers = self._index.tree(lease.tenant), MEMORY if lease.without_disk else TIERS
        known = lease.last_look
        if known is None or (known.num_changes, known.tiers) != (tree.num_changes, tiers):
            match = tree.match(
                lease.prompt, recurrent=self._recurrent, chunk_tokens=CHUNK_TOKENS, tiers=tiers
            )
            known = Look(tree.num_changes, tiers, match)
            lease.looked(known)
        return known.match

    def chosen(self, lease: Lease, match: Match) -> Match:
        """What of the match to take up: all of it, or nothing where running it again is faster, or
        where memory has no room for what would come from the disk.
        """
        if match.num_tokens == 0:
            return match
        if lease.is_run_whole:
            lease.decided("is_run_whole", MissReason.RUN_WHOLE)
            return _nothing_of(match)
        decision = restore_or_prefill(
            match.num_tokens,
            memory_bytes=match.read_bytes("memory"),
            disk_bytes=match.read_bytes("disk"),
            rates=self.rates,
        )
        orders = self._to_memory.orders(match)  # what memory holds already needs no room
        fits = not orders or self._leases.make_room(self._to_memory.num_bytes_of(orders))
        if decision.restore and fits:
            lease.decided(decision.reason)
            return match
        refused = MissReason.NO_MEMORY if decision.restore else MissReason.PREFILL_IS_FASTER
        lease.decided(decision.reason, refused)
        self.rates = self.rates if decision.restore else self.rates.after_refusal()
        return _nothing_of(match)

    def lacking(self, lease: Lease, match: Match) -> MissReason | None:
        """Why no more than the match was found of a prompt that was run before; None where nobody
        knows of more.
        """
        last = match.nodes[-1].key if match.nodes else None
        place = lease.tenant, last
        if match.part is None and self._index.unkept.begins(
            place, lease.prompt[match.num_tokens :]
        ):
            return MissReason.NO_MEMORY
        num_more = match.num_shared_tokens - match.num_tokens
        return MissReason.NO_STATE if self._recurrent and num_more > CHUNK_TOKENS else None

    def patience_s(self, match: Match) -> float:
        """How long to wait for the match to come from the disk; see luceasync.prefix.cost."""
        return patience_s(match.num_tokens, self.rates)

    def known(self, lease: Lease, match: Match) -> tuple[Node, ...]:
        """The nodes, root first, that hold the prompt's first tokens already: also where they were
        not taken up there is no need to keep them again.
        """
        return match.nodes or self.longest(lease).nodes


def _nothing_of(match: Match) -> Match:
    """The same prompt, of which nothing is taken up."""
    return replace(match, nodes=(), part=None, num_tokens=0, exact=False)
