"""What a prompt can take up, and what is kept of a generation: the prefix cache's decisions.

Owns the rates that were seen. Knows which node is wanted where; nodes are held by Holdings, moved
by StateMover, made out of lanes by Saves, on their way from the disk in Fetches and to it in
Writes. Claims says which must stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from luceasync.keeping.claim import Claim, plan_prefill, tokens_to_come
from luceasync.keeping.claims import Claims
from luceasync.keeping.fetches import Fetches, nodes_of
from luceasync.keeping.holdings import Holdings, Limits
from luceasync.keeping.saves import Kept, Saves
from luceasync.keeping.shelf import Fetched, Lost, Shelf
from luceasync.keeping.state import StateMover
from luceasync.keeping.writes import Writes
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.prefix.cost import RateName, Rates, restore_or_prefill
from luceasync.prefix.node import TIERS, Match, Node, Tier
from luceasync.request import CacheStatus, Restore

log = logging.getLogger(__name__)

MEMORY: frozenset[Tier] = frozenset(("memory",))


class Prefixes:
    """The prefix cache of one model. Synchronous; engine thread only."""

    def __init__(
        self,
        mover: StateMover,
        shelf: Shelf,
        limits: Limits,
        *,
        recurrent: bool,
        chunk_tokens: int,
        num_shards: tuple[int, int] = (1, 0),
    ) -> None:
        """`recurrent`: the model goes on only from where a state is held; `chunk_tokens`: of its
        prefill; `num_shards`: in this process and in others.
        """
        self._num_shards = num_shards
        self._mover = mover
        self._shelf = shelf
        self._limits = limits
        self._recurrent = recurrent
        self._chunk_tokens = chunk_tokens
        self._holdings = Holdings(mover, shelf, limits, recurrent=recurrent)
        self._rates = Rates()
        self._fetches = Fetches(self._holdings, mover, shelf, recurrent=recurrent)
        self._writes = Writes(self._holdings, mover, shelf, limits)
        self._claims = Claims(self._holdings, self._fetches, self._writes)
        self._saves = Saves(self._holdings, mover, self._claims, recurrent=recurrent)

    def __repr__(self) -> str:
        return f"Prefixes({self._holdings}, {self._claims}, {self._fetches})"

    @property
    def status(self) -> CacheStatus:
        """May be read from any thread."""
        return replace(self._holdings.status, num_unwritten=len(self._writes))

    # --- before the prefill ----------------------------------------------------------------------

    def admit(self, claim: Claim) -> None:
        """Look after a generation: what it could take up is not evicted from now on."""
        self._claims.add(claim)
        claim.match = self._match(claim)

    def prepare(self, claim: Claim, prefilling: Iterable[Claim]) -> bool:
        """Whether the claim can have a lane now; False while what it needs is on its way, from the
        disk or out of one of the running prefills.
        """
        if claim.awaited:
            return False
        claim.match = self._match(claim)
        coming = (tokens_to_come(claim, r, recurrent=self._recurrent) for r in prefilling)
        if max(coming, default=0) >= claim.match.num_tokens + CHUNK_TOKENS:
            return False
        claim.match = self._decide(claim, claim.match)
        orders = self._fetches.orders(claim.match)
        if orders:
            claim.started_s = claim.started_s or time.perf_counter()
            claim.awaited = {order.key for order in orders}
            self._fetches.begin(orders)
        return not orders

    def take_up(self, claim: Claim, lane: int) -> int:
        """Restore into the lane what `prepare` found; the tokens that need not be run. The copies
        are queued: see `settled`.
        """
        match = claim.match
        assert match is not None, "prepare comes first"
        nodes = nodes_of(match)
        claim.started_s = claim.started_s or time.perf_counter()
        claim.used_disk = any(node.key in claim.fetched for node in nodes)
        if nodes:
            self._mover.restore(lane, [node.key.hex() for node in nodes], match.num_tokens)
            self._holdings.tree(claim.tenant).touch([node.key for node in nodes], time.time())
            self._shelf.touch([node.key for node in nodes if "disk" in node.tiers])
            if match.exact:  # taken now: the node may be disowned before the copies arrive
                claim.logits = self._mover.logits(match.nodes[-1].key.hex())
            if match.nodes and match.part is None and (self._recurrent or claim.keep_prompt):
                self._write_later(match.nodes[-1].key, with_end=True)  # it has proved its worth
        known = self._known_nodes(claim, match)
        claim.path = [node.key for node in known]
        claim.path_end = known[-1].end if known else 0
        plan_prefill(
            claim,
            match.num_tokens,
            recurrent=self._recurrent,
            chunk_tokens=self._chunk_tokens,
            interval_tokens=self._limits.interval_tokens,
        )
        return match.num_tokens

    def settled(self, claim: Claim, lane: int) -> bool:
        """Whether what was taken up has arrived in the lane; `claim.restore` then tells of it."""
        match = claim.match
        assert match is not None and claim.started_s is not None
        if match.num_tokens and not self._mover.settled(lane):
            return False
        elapsed_s = time.perf_counter() - claim.started_s
        missed = claim.fault or match.miss_reason
        if match.num_tokens == 0:
            claim.restore = Restore(decision=claim.decision, miss_reason=missed)
            self._holdings.missed[missed or "prefill_is_faster"] += 1
            return True
        tier: Tier = "disk" if claim.used_disk else "memory"
        if not claim.used_disk:
            self.observed("bus_bytes_per_s", match.read_bytes("memory"), elapsed_s)
        claim.restore = Restore(tier, match.num_tokens, elapsed_s, claim.decision, missed)
        self._holdings.restored[tier] += 1
        self._holdings.restored_tokens[tier] += match.num_tokens
        log.info(
            "adopted node pos=%d local_shards=%d remote_shards=%d tier=%s",
            match.num_tokens, *self._num_shards, tier,
        )  # fmt: skip
        return True

    def settle(self, lane: int) -> None:
        """Wait until what was taken up has arrived in the lane."""
        self._mover.settle(lane)

    # --- while and after it runs -----------------------------------------------------------------

    def prefilled(self, claim: Claim, lane: int, end: int, logits: Tensor | None) -> None:
        """The lane stands after the prompt's first `end` tokens; `logits` after its last one."""
        while claim.cuts and claim.cuts[0].end <= end:
            cut = claim.cuts.popleft()
            is_last = cut.end == claim.num_prompt_tokens
            node = Kept(cut.end, is_turn_end=cut.is_turn_end, logits=logits if is_last else None)
            key = self._saves.keep(claim, lane, node)
            is_first_turn = cut.is_turn_end and cut.end <= min(claim.boundaries, default=0)
            if key is None:
                continue
            if is_last and self._recurrent and not claim.keep_prompt:
                claim.prompt_node = key  # its state is not needed if a turn's end follows
            else:
                self._write_later(key, with_end=not self._recurrent or is_last or is_first_turn)

    def finished(self, claim: Claim, lane: int, end: int, *, is_cut: bool = False) -> None:
        """The generation ends, for whatever reason; the lane stands after the first `end` tokens of
        its sequence. They are kept: the next turn goes on from there. `is_cut`: they end with a
        stop string, which nobody is shown and no next turn holds; a recurrent state is of no use
        behind it, and that of the prompt's end is the last one that is.
        """
        is_generated = claim.path_end >= claim.num_prompt_tokens
        key = None
        if not (is_cut and is_generated and self._recurrent):
            node = Kept(end, is_turn_end=True, is_generated=is_generated)
            key = self._saves.keep(claim, lane, node)
        if claim.prompt_node is not None and claim.prompt_node in self._holdings:
            self._write_later(claim.prompt_node, with_end=key is None)
        if key is not None:
            self._write_later(key, with_end=True)

    def disown(self, claim: Claim) -> None:
        """What the generation has computed cannot be trusted: nothing that it kept is taken up."""
        for key in claim.kept:
            self._holdings.forget(key, "memory")
            self._holdings.forget(key, "disk")
        self._writes.forgotten()
        self._shelf.remove(claim.kept)

    def release(self, claim: Claim) -> None:
        """The generation is over: its nodes may be evicted."""
        self._claims.remove(claim)
        self._claims.shrink()
        self._holdings.refresh_status()

    def observed(self, rate: RateName, amount: int, elapsed_s: float) -> None:
        """How long something took."""
        self._rates = self._rates.observed(rate, amount, elapsed_s)

    # --- to and from the disk --------------------------------------------------------------------

    @property
    def has_due_writes(self) -> bool:
        """Whether `hand_over` may have something to do before anything else happens."""
        return self._writes.is_due

    def hand_over(self, *, wait: bool = False) -> None:
        """Give the shelf what is to be written and has arrived in host memory; with `wait` all."""
        self._writes.hand_over(wait=wait)

    def found(
        self, added: Iterable[Node], removed: Iterable[bytes], *, is_whole: bool = True
    ) -> None:
        """Files that are on the disk now, and keys of files that are no longer; `is_whole`: there
        are no others that could not be looked at.
        """
        gone = list(removed)
        self._holdings.found(added, gone, is_whole=is_whole)
        for key in gone:
            self._writes.mend(key)
        self._holdings.refresh_status()

    def written(self, key: bytes, *, is_there: bool, again: bool = False) -> None:
        """What became of a write; `again`: the shelf was too busy."""
        self._writes.written(key, is_there=is_there, again=again)
        self._claims.shrink()
        self._holdings.refresh_status()

    def fetched(self, key: bytes, result: Fetched | Lost) -> None:
        """A node has come from the disk, or it cannot."""
        lost = self._fetches.fetched(key, result)
        for claim in self._claims.waiting_for(key):
            claim.awaited.discard(key)
            if lost is None and isinstance(result, Fetched):
                self._arrived(claim, key, result.num_bytes)
            elif lost is not None:
                claim.fault = lost.reason
                claim.without_disk |= lost.is_passing
        if lost is not None and not lost.is_passing:
            self._holdings.forget(key, "disk")
            self._writes.mend(key)

    def _arrived(self, claim: Claim, key: bytes, num_bytes: int) -> None:
        """A node is here that the claim waits for; the last one tells how fast the disk was."""
        claim.fetched.add(key)
        claim.num_fetched_bytes += num_bytes
        if not claim.awaited:
            assert claim.started_s is not None
            elapsed_s = time.perf_counter() - claim.started_s
            self.observed("disk_bytes_per_s", claim.num_fetched_bytes, elapsed_s)

    # --- inside ----------------------------------------------------------------------------------

    def _match(self, claim: Claim) -> Match:
        tiers = MEMORY if claim.without_disk else TIERS
        return self._holdings.tree(claim.tenant).match(
            claim.prompt, recurrent=self._recurrent, chunk_tokens=CHUNK_TOKENS, tiers=tiers
        )

    def _decide(self, claim: Claim, match: Match) -> Match:
        """What of the match to take up: all of it, or nothing where running it again is faster."""
        if match.num_tokens == 0:
            return match
        decision = restore_or_prefill(
            match.num_tokens,
            memory_bytes=match.read_bytes("memory"),
            disk_bytes=match.read_bytes("disk"),
            rates=self._rates,
        )
        claim.decision = decision.reason
        fits = self._claims.make_room(self._fetches.num_bytes_of(self._fetches.orders(match)))
        if decision.restore and fits:
            return match
        claim.fault = "no_memory" if decision.restore else "prefill_is_faster"
        self._rates = self._rates if decision.restore else self._rates.after_refusal()
        return replace(match, nodes=(), part=None, num_tokens=0, exact=False)

    def _known_nodes(self, claim: Claim, match: Match) -> tuple[Node, ...]:
        """The nodes, root first, that hold the prompt's first tokens already: also where they were
        not taken up there is no need to keep them again.
        """
        return match.nodes or self._match(claim).nodes

    def _write_later(self, key: bytes, *, with_end: bool) -> None:
        node = self._holdings.node(key)
        assert node is not None, "a node that was just kept or used is here"
        self._writes.add(node, with_end=with_end)
