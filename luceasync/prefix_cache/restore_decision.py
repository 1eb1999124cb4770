"""Which part of a prompt is restored, which is run again, and what is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.nodes import MissReason, NodeKey
from luceasync.prefix_cache.index import NodeIndex
from luceasync.prefix_cache.lease import Lease, MatchMemo
from luceasync.prefix_cache.leases import Leases
from luceasync.prefix_cache.read_in import ReadIn
from luceasync.prefix_tree.cost import (
    Arrival,
    RateName,
    Rates,
    is_given_up,
    patience_s,
    prefill_work,
    restore_or_prefill,
)
from luceasync.prefix_tree.node import MEMORY, TIERS, Match, Node, common_prefix


def shared_tokens(lease: Lease, running: Lease) -> int:
    """Length of the common prefix of both prompts, 0 for those of different tenants."""
    is_ours = lease is not running and lease.tenant == running.tenant
    return common_prefix(lease.prompt, running.prompt) if is_ours else 0


def tokens_to_come(lease: Lease, running: Lease, *, recurrent: bool) -> int:
    """How many tokens of the lease's prompt the prefill of `running` will have saved at its end."""
    if not running.cuts or lease.is_run_whole:
        return 0
    prompt, shared = lease.prompt, shared_tokens(lease, running)
    if shared == len(prompt) == running.num_prompt_tokens:
        return shared  # with the logits after it, so that nothing is left to run
    usable = min(shared, len(prompt) - 1)
    ends = [cut.end for cut in running.cuts]
    whole = max((end for end in ends if end <= usable), default=0)
    if recurrent or ends[-1] < usable:
        return whole
    return max(whole, usable // CHUNK_TOKENS * CHUNK_TOKENS)


class RestoreDecision:
    """Whether a prompt's prefix is restored, from memory or from the disk, or run again. Owns the
    measured rates. Engine thread only."""

    def __init__(
        self,
        index: NodeIndex,
        read_in: ReadIn,
        leases: Leases,
        *,
        recurrent: bool,
        attention_tokens: float | None,
    ) -> None:
        self._attention_tokens = attention_tokens
        self._index = index
        self._read_in = read_in
        self._leases = leases
        self._recurrent = recurrent
        self.rates = Rates()

    def observe(self, rate: RateName, amount: float, elapsed_s: float) -> None:
        """Record how long something took."""
        self.rates = self.rates.observed(rate, amount, elapsed_s)

    def work(self, begin: int, end: int) -> float:
        """The cost of running these tokens, see luceasync.prefix_tree.cost."""
        return prefill_work(begin, end, self._attention_tokens)

    def gives_up(self, lease: Lease, progress: Mapping[NodeKey, int], now_s: float) -> bool:
        """Whether to run the tokens of a lease that waits for the disk; `progress`: how many bytes
        of each node in transit have been read."""
        assert lease.match is not None and lease.started_s is not None, "it waits for a match"
        coming = lease.num_fetched_bytes + sum(progress.get(key, 0) for key in lease.awaited)
        come = Arrival(min(coming, lease.num_ordered_bytes), now_s - lease.started_s)
        lease.see(come)
        if not is_given_up(
            self.work(0, lease.match.num_tokens),
            num_bytes=lease.num_ordered_bytes,
            first=lease.first_arrival,
            come=come,
            rates=self.rates,
        ):
            return False
        self.observe("disk_bytes_per_s", come.num_bytes, come.elapsed_s)
        return True

    def longest_match(self, lease: Lease) -> Match:
        """The longest part of the prompt that could be restored now: from the disk too, unless that
        failed to provide what this lease has requested."""
        tree, tiers = self._index.tree(lease.tenant), MEMORY if lease.without_disk else TIERS
        memo = lease.memo
        if memo is None or (memo.num_changes, memo.tiers) != (tree.num_changes, tiers):
            match = tree.match(
                lease.prompt, recurrent=self._recurrent, chunk_tokens=CHUNK_TOKENS, tiers=tiers
            )
            memo = MatchMemo(tree.num_changes, tiers, match)
            lease.remember(memo)
        return memo.match

    def choose(self, lease: Lease, match: Match) -> Match:
        """What of the match to restore: all of it, or nothing if running it again is faster, or if
        memory has no room for what would be read from the disk."""
        if match.num_tokens == 0:
            return match
        if lease.is_run_whole:
            lease.decide("is_run_whole", MissReason.RUN_WHOLE)
            return nothing_of(match)
        decision = restore_or_prefill(
            self.work(0, match.num_tokens),
            memory_bytes=match.read_bytes("memory"),
            disk_bytes=match.read_bytes("disk"),
            rates=self.rates,
        )
        orders = self._read_in.orders(match)  # what memory holds already needs no room
        fits = not orders or self._leases.make_room(self._read_in.num_bytes_of(orders))
        if decision.restore and fits:
            # The rate of the bus alone is not.
            is_read = lease.fetched and decision.reason == "not_measured"
            lease.decide((lease.decision if is_read else None) or decision.reason)
            return match
        refused = MissReason.NO_MEMORY if decision.restore else MissReason.PREFILL_IS_FASTER
        lease.decide(decision.reason, refused)
        self.rates = self.rates if decision.restore else self.rates.after_refusal()
        return nothing_of(match)

    def lost_reason(self, lease: Lease, match: Match) -> MissReason | None:
        """Why the match is shorter than the computed prefix of a prompt that was run before; None
        if no more of it is known to have been computed."""
        last = match.nodes[-1].key if match.nodes else None
        if match.part is None and self._index.eviction_misses.matches(
            (lease.tenant, last), lease.prompt[match.num_tokens :]
        ):
            return MissReason.NO_MEMORY
        num_more = match.num_shared_tokens - match.num_tokens
        return MissReason.NO_STATE if self._recurrent and num_more > CHUNK_TOKENS else None

    def patience_s(self, match: Match) -> float:
        """How long to wait for the match to be read from the disk; see
        luceasync.prefix_tree.cost."""
        return patience_s(self.work(0, match.num_tokens), self.rates)

    def span_patience_s(self, begin: int, end: int) -> float:
        """How long to wait for a node of these tokens."""
        return patience_s(self.work(begin, end), self.rates)

    def known_nodes(self, lease: Lease, match: Match) -> tuple[Node, ...]:
        """The nodes, root first, that already hold the prompt's first tokens: even if they are not
        restored, they need not be saved again."""
        return match.nodes or self.longest_match(lease).nodes


def nothing_of(match: Match) -> Match:
    """A match of the same prompt, of which nothing is restored."""
    return replace(match, nodes=(), part=None, num_tokens=0, exact=False)
