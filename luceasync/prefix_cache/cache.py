"""The prefix cache as a generation sees it: what it takes up, and what is kept of it.

Which nodes there are is known by NodeIndex, their tensors are with MemoryNodes. RestoreDecision
says what is taken up, Leases what must stay; LaneToMemory, MemoryToDisk and DiskToMemory move it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from luceasync.disk_cache.outcomes import Miss
from luceasync.host_cache.copy_stream import COPY_TIMEOUT_S, Call, Ticket
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.nodes import MissReason, NodeKey
from luceasync.prefix_cache import write_back
from luceasync.prefix_cache.disk_orders import DiskOrders, Fetched, Written
from luceasync.prefix_cache.index import Limits, NodeIndex
from luceasync.prefix_cache.lease import Lease, Look, least_tokens
from luceasync.prefix_cache.leases import Leases
from luceasync.prefix_cache.memory import MemoryNodes
from luceasync.prefix_cache.read_in import DiskToMemory, nodes_of
from luceasync.prefix_cache.save_lane import Kept, LaneToMemory
from luceasync.prefix_cache.write_back import MemoryToDisk
from luceasync.prefix_tree.cost import RateName, Rates, patience_s, restore_or_prefill
from luceasync.prefix_tree.node import TIERS, Match, Node, Tier, common_prefix
from luceasync.request import Restore
from luceasync.status import CacheStatus

# What other prefills will have kept of a prompt that waits. Choices alone: knows no tree, no
# lane and no files.


def shared_tokens(lease: Lease, running: Lease) -> int:
    """How many tokens the prompts of both begin with, if they may know of each other."""
    is_ours = lease is not running and lease.tenant == running.tenant
    return common_prefix(lease.prompt, running.prompt) if is_ours else 0


def tokens_to_come(lease: Lease, running: Lease, *, recurrent: bool) -> int:
    """How many tokens of the lease's prompt the prefill of `running` will have kept when it is
    through.
    """
    if not running.cuts or lease.is_run_whole:
        return 0
    prompt, shared = lease.prompt, shared_tokens(lease, running)
    if shared == len(prompt) == running.num_prompt_tokens:
        return shared  # with the logits after it: nothing is left to run
    usable = min(shared, len(prompt) - 1)
    ends = [cut.end for cut in running.cuts]
    whole = max((end for end in ends if end <= usable), default=0)
    if recurrent or ends[-1] < usable:
        return whole
    return max(whole, usable // CHUNK_TOKENS * CHUNK_TOKENS)


# Where it is decided what of a prompt is restored, from memory or from the disk, or run again.
# Owns the rates that were seen. Reads nothing itself: what has to come from the disk is ordered
# by DiskToMemory.


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
        """How long to wait for the match to come from the disk; see luceasync.prefix_tree.cost."""
        return patience_s(match.num_tokens, self.rates)

    def known(self, lease: Lease, match: Match) -> tuple[Node, ...]:
        """The nodes, root first, that hold the prompt's first tokens already: also where they were
        not taken up there is no need to keep them again.
        """
        return match.nodes or self.longest(lease).nodes


def _nothing_of(match: Match) -> Match:
    """The same prompt, of which nothing is taken up."""
    return replace(match, nodes=(), part=None, num_tokens=0, exact=False)


log = logging.getLogger(__name__)


class Prefixes:
    """The prefix cache of one model. Synchronous; engine thread only."""

    def __init__(
        self,
        memory: MemoryNodes,
        disk: DiskOrders,
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
        self._memory = memory
        self._disk = disk
        self._limits = limits
        self._recurrent = recurrent
        self._chunk_tokens = chunk_tokens
        self._min_fork_tokens = least_tokens(memory.token_size)
        self.index = NodeIndex(memory, disk, limits, recurrent=recurrent)
        self.lost = self.index.lost
        self._post: Callable[[Call], None] | None = None
        self._to_memory = DiskToMemory(self.index, memory, disk, recurrent=recurrent)
        room = (self._make_file_room, self._let_go)
        self._to_disk = MemoryToDisk(self.index, memory, disk, limits, self._hear, *room)
        self._leases = Leases(self.index, self._to_memory, self._to_disk, memory.lanes)
        self.clear = self._leases.clear
        self._decision = RestoreDecision(
            self.index, self._to_memory, self._leases, recurrent=recurrent
        )
        self._from_lanes = LaneToMemory(self.index, memory, self._leases, recurrent=recurrent)
        self.has_copied = self._from_lanes.has_copied

    def __repr__(self) -> str:
        return f"Prefixes({self.index}, {self._leases}, {self._to_memory})"

    @property
    def status(self) -> CacheStatus:
        """May be read from any thread."""
        return replace(self.index.status, num_unwritten=len(self._to_disk))

    def listen(self, post: Callable[[Call], None]) -> None:
        """Hear of copies that arrive; `post`, of any thread, has a call run in the engine's."""
        self._post = post

    # --- before the prefill ----------------------------------------------------------------------

    def admit(self, lease: Lease) -> None:
        """Look after a generation: what it could take up is not evicted from now on."""
        self._leases.add(lease)
        lease.found(self._decision.longest(lease))

    def prepare(self, lease: Lease, prefilling: Iterable[Lease]) -> bool:
        """Whether the lease can have a lane now; False while what it needs is on its way, from the
        disk or out of one of the running prefills.
        """
        if lease.awaited:
            return False
        match = self._decision.longest(lease)
        lease.found(match)
        others = list(prefilling) if self._limits.hold_any else []  # what comes of others is kept
        coming = (tokens_to_come(lease, r, recurrent=self._recurrent) for r in others)
        if lease.is_worth_waiting(max(coming, default=0), match.num_tokens):
            return False
        lease.shares(max([match.num_shared_tokens, *(shared_tokens(lease, r) for r in others)]))
        match = self._decision.chosen(lease, match)
        lease.found(match)
        orders = self._to_memory.orders(match)
        if orders:
            lease.waits_for((order.key for order in orders), time.perf_counter())
            self._to_memory.begin(orders, self._decision.patience_s(match))
        return not orders

    def take_up(self, lease: Lease, lane: int) -> int:
        """Restore into the lane what `prepare` found; the tokens that need not be run. The copies
        are queued: see `is_taken_up`.
        """
        match = lease.match
        assert match is not None, "prepare comes first"
        nodes = nodes_of(match)
        lease.begins(nodes, time.perf_counter())
        if nodes:
            self._restore(lease, lane, match, [node.key for node in nodes])
            self._disk.touch([node.key for node in nodes if "disk" in node.tiers])
            again = nodes[-1].end - self._to_disk.safe_end(nodes[:-1])
            if match.part is None and write_back.at_use(lease, again, recurrent=self._recurrent):
                self._to_disk.add(nodes[-1], with_end=True)
        lease.holds(self._decision.known(lease, match))
        lease.plan_prefill(
            match.num_tokens,
            recurrent=self._recurrent,
            chunk_tokens=self._chunk_tokens,
            interval_tokens=self._limits.interval_tokens,
            min_fork_tokens=self._min_fork_tokens,
        )
        return match.num_tokens

    def _restore(self, lease: Lease, lane: int, match: Match, keys: list[NodeKey]) -> None:
        ticket = self._memory.restore(lane, keys, match.num_tokens)
        # Taken now: the node may be disowned before the copies arrive.
        logits = self._memory.logits(match.nodes[-1].key) if match.exact else None
        lease.restores(ticket, logits)
        if not lease.has_arrived:
            self._hear(ticket, lease.arrived)
        self.index.tree(lease.tenant).touch(keys, time.time())

    def is_taken_up(self, lease: Lease) -> bool:
        """Whether what was taken up has arrived in the lane; `lease.restore` then tells of it.
        Raises what went wrong with the copies, and TimeoutError.
        """
        match = lease.match
        assert match is not None and lease.started_s is not None and lease.lane_s is not None
        now_s = time.perf_counter()
        if lease.ticket is not None:
            if not lease.has_arrived and now_s - lease.lane_s < COPY_TIMEOUT_S:
                return False
            if not lease.ticket.is_done:
                raise TimeoutError(f"copies into a lane: not over within {COPY_TIMEOUT_S:g} s")
            lease.ticket.wait()
        elapsed_s = now_s - lease.started_s
        missed = lease.fault or match.miss_reason or self._decision.lacking(lease, match)
        if match.num_tokens == 0:
            lease.restored(Restore(decision=lease.decision, miss_reason=missed))
            self.index.missed[missed or MissReason.PREFILL_IS_FASTER] += 1
            return True
        tier: Tier = "disk" if lease.used_disk else "memory"
        if not lease.used_disk:
            self.observed("bus_bytes_per_s", match.read_bytes("memory"), elapsed_s)
        lease.restored(Restore(tier, match.num_tokens, elapsed_s, lease.decision, missed))
        self.index.restored[tier] += 1
        self.index.restored_tokens[tier] += match.num_tokens
        log.debug(
            "adopted node pos=%d local_shards=%d remote_shards=%d tier=%s",
            match.num_tokens, *self._num_shards, tier,
        )  # fmt: skip
        return True

    # --- while and after it runs -----------------------------------------------------------------

    def prefilled(self, lease: Lease, lane: int, end: int, logits: Tensor | None) -> None:
        """The lane stands after the prompt's first `end` tokens; `logits` after its last one."""
        while cut := lease.next_cut(end):
            is_last = cut.end == lease.num_prompt_tokens
            kept = Kept(cut.end, is_turn_end=cut.is_turn_end, logits=logits if is_last else None)
            node = self._from_lanes.keep(lease, lane, kept)
            if node is None:
                continue
            with_end = write_back.at_cut(lease, node, recurrent=self._recurrent)
            if with_end is None:
                lease.prompt_ends_with(node.key)
            else:
                lease.orders(node, with_end=with_end)
                self._to_disk.add(node, with_end=with_end)

    def finished(self, lease: Lease, lane: int, end: int, *, is_cut: bool = False) -> None:
        """The generation ends, for whatever reason; the lane stands after the first `end` tokens of
        its sequence. They are kept: the next turn goes on from there. `is_cut`: they end with a
        stop string, which no next turn holds: a recurrent state is of no use behind it.
        """
        is_generated = lease.path_end >= lease.num_prompt_tokens
        exact_end = self._memory.lanes.exact_end(lane, end)  # the next turn runs the rest again
        node = None
        if not self._recurrent or (exact_end == end and not (is_cut and is_generated)):
            if exact_end > lease.num_prompt_tokens:
                lease.leave_out_opening(self.index.node)
            kept = Kept(exact_end, is_turn_end=exact_end == end, is_generated=is_generated)
            node = self._from_lanes.keep(lease, lane, kept)
        is_written = node is not None and (not is_generated or lease.returns)
        prompt = None if lease.prompt_node is None else self.index.node(lease.prompt_node)
        if prompt is not None and not lease.is_opening(prompt):
            self._to_disk.add(prompt, with_end=not is_written)
        tip = self.index.node(lease.path[-1]) if lease.path else None
        if node is not None and is_written:
            self._to_disk.add(node, with_end=True)
        elif node is None and tip and write_back.at_end(lease, tip, recurrent=self._recurrent):
            self._to_disk.add(tip, with_end=True)
        self._leases.answered(lease)

    def disown(self, lease: Lease) -> None:
        """What the generation has computed cannot be trusted: nothing that it kept is taken up."""
        self._leases.forget(lease.kept)

    def release(self, lease: Lease) -> None:
        """The generation is over: its nodes may be evicted."""
        self._leases.remove(lease)
        self._leases.shrink()
        self.index.refresh_status()

    def observed(self, rate: RateName, amount: int, elapsed_s: float) -> None:
        """How long something took."""
        self._decision.observed(rate, amount, elapsed_s)

    @property
    def has_due_writes(self) -> bool:
        """Whether `hand_over` may have something to do before anything else happens."""
        return self._to_disk.is_due

    def hand_over(self, *, wait: bool = False) -> None:
        """Give the disk what is to be written and has arrived in host memory; with `wait` all."""
        self._to_disk.hand_over(wait=wait)

    def found(
        self, added: Iterable[Node], removed: Iterable[NodeKey], *, is_whole: bool = True
    ) -> None:
        """Files that are on the disk now, and keys of files that are no longer; `is_whole`: there
        are no others that could not be looked at.
        """
        gone = list(removed)
        self.index.found(added, gone, is_whole=is_whole)
        for key in gone:
            self._to_disk.mend(key)
        self.index.refresh_status()

    def written(self, key: NodeKey, written: Written) -> None:
        """What became of a write."""
        self._to_disk.written(key, written)
        self._leases.shrink()
        self.index.refresh_status()

    def fetched(self, key: NodeKey, result: Fetched | Miss) -> None:
        """A node has come from the disk, or it cannot."""
        lost = self._to_memory.fetched(key, result)
        for lease in self._leases.waiting_for(key):
            if lost is not None:
                lease.missed(key, lost.reason)
            elif isinstance(result, Fetched):
                self._came(lease, key, result.num_bytes)
                if result.end_fault is not None:
                    lease.missed(key, result.end_fault)
        if lost is not None and not lost.reason.is_passing:
            self.index.forget(key, "disk")
            self._to_disk.mend(key)
        self._leases.shrink()  # who ordered it may have left

    def _came(self, lease: Lease, key: NodeKey, num_bytes: int) -> None:
        """A node is here that the lease waits for; the last one tells how fast the disk was."""
        lease.came(key, num_bytes)
        if not lease.awaited:
            assert lease.started_s is not None
            elapsed_s = time.perf_counter() - lease.started_s
            self.observed("disk_bytes_per_s", lease.num_fetched_bytes, elapsed_s)

    def _make_file_room(self, num_bytes: int) -> bool:
        return self._leases.make_file_room(num_bytes)

    def _let_go(self) -> None:
        self._leases.shrink()

    def _hear(self, ticket: Ticket, call: Call) -> None:
        """Have it called in this thread once the ticket is done."""
        post = self._post
        assert post is not None, "copies are under way, and nobody listens"
        ticket.when_done(lambda: post(call))
