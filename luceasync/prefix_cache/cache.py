"""The prefix cache as a generation sees it: what is restored, and what is saved.

NodeIndex knows which nodes exist, MemoryNodes holds their tensors, and Leases decides which must
stay. RestoreDecision chooses what is restored; LaneSaver, WriteBack and ReadIn move nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from luceasync.disk_cache.outcomes import Miss
from luceasync.host_cache.copy_stream import COPY_TIMEOUT_S, Callback, Ticket
from luceasync.nodes import MissReason, NodeKey
from luceasync.prefix_cache.disk_orders import DiskOrders, FetchedNode, FindOrder, WriteReport
from luceasync.prefix_cache.index import Limits, NodeIndex
from luceasync.prefix_cache.lease import Lease, min_state_tokens
from luceasync.prefix_cache.leases import Leases
from luceasync.prefix_cache.lookup import DirectLookup
from luceasync.prefix_cache.memory import MemoryNodes
from luceasync.prefix_cache.read_in import ReadIn, nodes_of
from luceasync.prefix_cache.restore_decision import (
    RestoreDecision,
    shared_tokens,
    tokens_to_come,
)
from luceasync.prefix_cache.save_lane import LaneSaver, SavePoint
from luceasync.prefix_cache.write_back import (
    PendingFile,
    WriteBack,
    writes_end_in_prompt,
    writes_end_of_path,
    writes_end_when_restored,
)
from luceasync.prefix_tree.cost import (
    LEAST,
    RateName,
)
from luceasync.prefix_tree.node import Match, Node, Tier
from luceasync.request import Restore
from luceasync.status import CacheStatus

log = logging.getLogger(__name__)

# More than two rounds of speculation, of which one is queued while the other is read, can add.
LATE_TOKENS = 128


class PrefixCache:
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
        attention_tokens: float | None = None,
    ) -> None:
        """`recurrent`: the model can continue only from a saved state; `chunk_tokens`: of its
        prefill; `num_shards`: in this process and in others; `attention_tokens`: see
        luceasync.prefix_tree.cost.prefill_work."""
        self._num_shards = num_shards
        self._memory = memory
        self._disk = disk
        self._limits = limits
        self._recurrent = recurrent
        self._chunk_tokens = chunk_tokens
        self._min_fork_tokens = min_state_tokens(memory.token_size)
        self.index = NodeIndex(memory, disk, limits, recurrent=recurrent)
        self._post: Callable[[Callback], None] | None = None
        self._read_in = ReadIn(self.index, memory, disk, recurrent=recurrent)
        self._write_back = WriteBack(self.index, memory, disk, limits)
        self._leases = Leases(self.index, self._read_in, self._write_back, memory.lanes)
        self._decision = RestoreDecision(
            self.index,
            self._read_in,
            self._leases,
            recurrent=recurrent,
            attention_tokens=attention_tokens,
        )
        self._lookup = DirectLookup(
            self.index,
            disk,
            limits,
            recurrent=recurrent,
            chunk_tokens=chunk_tokens,
            min_fork_tokens=self._min_fork_tokens,
            patience_s=self._decision.span_patience_s,
        )
        self._lane_saver = LaneSaver(self.index, memory, self._leases, recurrent=recurrent)
        # Methods that concern one of these alone are called on it directly.
        self.lost = self.index.lost
        self.clear, self.conversation_words = self._leases.clear, self._leases.words
        self.try_save = self._lane_saver.try_save

    def __repr__(self) -> str:
        return f"PrefixCache({self.index}, {self._leases}, {self._read_in})"

    @property
    def status(self) -> CacheStatus:
        """May be called from any thread."""
        return replace(self.index.status, num_unwritten=len(self._write_back))

    def listen(self, post: Callable[[Callback], None]) -> None:
        """Register for the arrival of copies: `post`, which any thread may call, runs a call in the
        engine's thread."""
        self._post = post

    # --- restore, before the prefill -------------------------------------------------------------

    def admit(self, lease: Lease) -> None:
        """Track a generation: what it could restore is not evicted from now on."""
        self._leases.add(lease)
        lease.set_match(self._decision.longest_match(lease))

    def prepare(self, lease: Lease, prefilling: Iterable[Lease]) -> bool:
        """Whether the lease can have a lane now; False while what it needs is on its way from the
        disk, is still being computed by a running prefill, or is being looked for on the disk."""
        if lease.awaited:
            return False
        match = self._decision.longest_match(lease)
        lease.set_match(match)
        if self._lookup.is_due(lease, match):
            return False
        # Without memory for nodes, these prefills save nothing.
        others = list(prefilling) if self._limits.hold_any else []
        coming = (tokens_to_come(lease, r, recurrent=self._recurrent) for r in others)
        if lease.is_worth_waiting(max(coming, default=0), match.num_tokens):
            return False
        shared = [match.num_shared_tokens, *(shared_tokens(lease, r) for r in others)]
        lease.set_shared(max(shared))
        match = self._decision.choose(lease, match)
        lease.set_match(match)
        orders = self._read_in.orders(match)
        if orders:
            num_bytes = sum(map(self._read_in.size, orders))
            lease.wait_for((order.key for order in orders), num_bytes, time.perf_counter())
            self._read_in.begin(orders, self._decision.patience_s(match))
        return not orders

    def restore(self, lease: Lease, lane: int) -> int:
        """Restore into the lane what `prepare` chose; returns the number of tokens that need not be
        run. The copies are queued: see `has_restored`."""
        match = lease.match
        assert match is not None, "prepare comes first"
        nodes = nodes_of(match)
        lease.start(nodes, time.perf_counter())
        if nodes:
            self._restore(lease, lane, match, [node.key for node in nodes])
            self._disk.touch([node.key for node in nodes if "disk" in node.tiers])
            num_again = nodes[-1].end - self._write_back.safe_end(nodes[:-1])
            is_whole = match.part is None
            if is_whole and writes_end_when_restored(lease, num_again, recurrent=self._recurrent):
                self._write_back.add(nodes[-1], with_end=True)
        lease.set_path(self._decision.known_nodes(lease, match))
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
        # Taken now: the node may be dropped before the copies arrive.
        logits = self._memory.logits(match.nodes[-1].key) if match.exact else None
        lease.begin_restore(ticket, logits)
        if not lease.has_arrived:
            self._call_when_done(ticket, lease.arrive)
        self.index.tree(lease.tenant).touch(keys, time.time())

    def has_restored(self, lease: Lease) -> bool:
        """Whether the copies have arrived in the lane; `lease.restore` then describes what was
        restored. Raises the error of a failed copy, and TimeoutError."""
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
        missed = lease.fault or match.miss_reason or self._decision.lost_reason(lease, match)
        if match.num_tokens == 0:
            lease.end_restore(Restore(decision=lease.decision, miss_reason=missed))
            self.index.missed[missed or MissReason.PREFILL_IS_FASTER] += 1
            return True
        tier: Tier = "disk" if lease.used_disk else "memory"
        if not lease.used_disk:
            self.observe("bus_bytes_per_s", match.read_bytes("memory"), elapsed_s)
        lease.end_restore(Restore(tier, match.num_tokens, elapsed_s, lease.decision, missed))
        self.index.restored[tier] += 1
        self.index.restored_tokens[tier] += match.num_tokens
        log.debug(
            "adopted node pos=%d local_shards=%d remote_shards=%d tier=%s",
            match.num_tokens, *self._num_shards, tier,
        )  # fmt: skip
        return True

    # --- save, while it runs and at its end ------------------------------------------------------

    def can_save_late(self, lease: Lease) -> bool:
        """Whether `save_prompt` of the whole prompt saves the same after a few steps more: rows of
        keys and values stay, but a state of the end does not, and a drafter's oldest features are
        overwritten by new ones."""
        reach = self._memory.num_feature_tokens
        has_features = not reach or lease.num_prompt_tokens + LATE_TOKENS <= reach
        return not self._recurrent and has_features

    def save_prompt(self, lease: Lease, lane: int, end: int, logits: Tensor | None) -> None:
        """Save what is planned of a prompt of which the lane holds the first `end` tokens;
        `logits`: those after the last of these."""
        while cut := lease.next_cut(end):
            is_last = cut.end == lease.num_prompt_tokens
            at_end = logits if is_last else None
            point = SavePoint(cut.end, is_turn_end=cut.is_turn_end, logits=at_end)
            node = self._lane_saver.save(lease, lane, point)
            if node is None:
                continue
            with_end = writes_end_in_prompt(lease, node, recurrent=self._recurrent)
            if with_end is None:
                lease.set_prompt_node(node.key)
            else:
                lease.note_write(node, with_end=with_end)
                self._write_back.add(node, with_end=with_end)

    def save_sequence(
        self, lease: Lease, lane: int, end: int, *, is_cut: bool = False, is_ahead: bool = False
    ) -> None:
        """Save a generation that ends, for whatever reason, with the first `end` tokens of its
        sequence in the lane: the next turn continues from there. `is_cut`: they end with a stop
        string, which the next turn will not contain, so a recurrent state after it is useless.
        `is_ahead`: more tokens were run on the lane, so its state belongs to a later end."""
        is_generated = lease.path_end >= lease.num_prompt_tokens
        exact_end = self._memory.lanes.exact_end(lane, end)  # the next turn runs the rest again
        node = None
        has_state = exact_end == end and not is_ahead and not (is_cut and is_generated)
        if not self._recurrent or has_state:
            if exact_end > lease.num_prompt_tokens:
                lease.drop_opening(self.index.node)
            point = SavePoint(exact_end, is_turn_end=exact_end == end, is_generated=is_generated)
            node = self._lane_saver.save(lease, lane, point)
        is_written = node is not None and (not is_generated or lease.returns)
        prompt = None if lease.prompt_node is None else self.index.node(lease.prompt_node)
        if prompt is not None and not lease.is_opening(prompt):
            self._write_back.add(prompt, with_end=not is_written)
        tip = self.index.node(lease.path[-1]) if lease.path else None
        if node is not None and is_written:
            self._write_back.add(node, with_end=True)
        elif node is None and tip and writes_end_of_path(lease, tip, recurrent=self._recurrent):
            self._write_back.add(tip, with_end=True)
        self._leases.end_turn(lease)

    def drop(self, lease: Lease) -> None:
        """Drop every node that the generation has saved: its results cannot be trusted."""
        self._leases.drop(lease.saved)

    def release(self, lease: Lease) -> None:
        """The generation is over: its nodes may be evicted."""
        self._leases.remove(lease)
        self._shrink()

    def observe(self, rate: RateName, amount: float, elapsed_s: float) -> None:
        """Record how long a transfer or a run took."""
        self._decision.observe(rate, amount, elapsed_s)

    def observe_prefill(self, begin: int, end: int, elapsed_s: float) -> None:
        """Record how long running tokens `[begin, end)` of a prompt took."""
        if end - begin >= LEAST["prefill_tokens_per_s"]:
            self.observe("prefill_tokens_per_s", self._decision.work(begin, end), elapsed_s)

    # --- to the disk and back --------------------------------------------------------------------

    @property
    def has_due_writes(self) -> bool:
        """Whether `hand_over` may have work before anything else happens."""
        return self._write_back.is_due

    def hand_over(self, *, wait: bool = False) -> None:
        """Give the disk nodes that have arrived in host memory, a few files at a time; with `wait`
        all of them, however long their copies take."""
        num_files = len(self._write_back)
        while (file := self._write_back.next_file(wait=wait)) is not None:
            ticket = self._memory.ticket(file.key)
            if not (wait or ticket.is_done):
                self._write_back.await_arrival(file.key)
                self._call_when_done(ticket, partial(self._copies_arrived, file.key))
                break
            self._write(file)
        if len(self._write_back) < num_files:
            self._leases.shrink()

    def _write(self, file: PendingFile) -> None:
        """Have the file written, if the disk has room for it beside the writes in progress."""
        node = self._write_back.export(file)
        num_bytes = self._disk.file_bytes(node.tensors)
        if self._leases.make_file_room(num_bytes + self._write_back.num_bytes_under_way):
            self._write_back.begin(node, num_bytes)
        else:
            self._write_back.cancel(file)
            log.debug("node %s is not written: no room within the budget", file.key.hex()[:16])

    def _copies_arrived(self, key: NodeKey) -> None:
        self._write_back.arrived(key)
        self.hand_over()

    def written(self, key: NodeKey, report: WriteReport) -> None:
        """Record the outcome of a write."""
        self._write_back.written(key, report)
        self._shrink()

    def fetched(self, key: NodeKey, result: FetchedNode | Miss) -> None:
        """Accept a node that was read from the disk, or the reason why it could not be read."""
        lost = self._read_in.fetched(key, result)
        for lease in self._leases.waiting_for(key):
            if lost is not None:
                lease.miss(key, lost.reason)
            elif isinstance(result, FetchedNode):
                self._receive(lease, key, result.num_bytes)
                if result.end_fault is not None:
                    lease.miss(key, result.end_fault)
        if lost is not None and not lost.reason.is_passing:
            self.index.drop(key, "disk")
            self._write_back.mend(key)
        self._leases.shrink()  # the lease that ordered it may be gone

    def _receive(self, lease: Lease, key: NodeKey, num_bytes: int) -> None:
        """Notify a lease that waits for the node; its last node shows how fast the disk was."""
        lease.receive(key, num_bytes)
        if not lease.awaited:
            assert lease.started_s is not None
            elapsed_s = time.perf_counter() - lease.started_s
            self.observe("disk_bytes_per_s", lease.num_fetched_bytes, elapsed_s)

    def reading(self, progress: Mapping[NodeKey, int]) -> None:
        """Record how many bytes of each node in transit have been read: prompts stop waiting for a
        disk that is slower than running their tokens."""
        now_s = time.perf_counter()
        waiting = (lease for lease in self._leases if lease.awaited)
        for lease in [each for each in waiting if self._decision.gives_up(each, progress, now_s)]:
            given_up = lease.give_up()
            self._read_in.give_up(key for key in given_up if not self._leases.waiting_for(key))

    def found(self, asked: Sequence[FindOrder], there: Sequence[Node]) -> None:
        """Record which of the requested files were found."""
        self.index.files_changed(there, (), is_whole=False)
        self._lookup.found(asked, there)

    def begin_lookups(self) -> None:
        """The directory is open: files may be looked for from now on."""
        self._lookup.is_open = True

    def keep_disk(self, keeps_disk: bool) -> None:
        """Set whether this server enforces the budget of a shared directory."""
        self.index.keeps_disk = keeps_disk
        self._shrink()

    def files_changed(
        self, added: Iterable[Node], removed: Iterable[NodeKey], *, is_whole: bool = True
    ) -> None:
        """Record files that are on the disk now, and keys of files that no longer are; `is_whole`:
        no file was left out because it could not be examined."""
        gone = list(removed)
        self.index.files_changed(added, gone, is_whole=is_whole)
        for key in gone:
            self._write_back.mend(key)
        self._shrink()  # other servers write even while this one is idle

    def others_changed(self, files: Iterable[tuple[float, int]], num_removals: int) -> None:
        """Record the files of other models in the directory: when each was last used, and its size,
        after `num_removals` orders to remove some."""
        self.index.others.replace(files, num_removals)
        self._leases.make_file_room(self._write_back.num_bytes_under_way)

    def _shrink(self) -> None:
        self._leases.shrink()
        self.index.refresh_status()

    def _call_when_done(self, ticket: Ticket, call: Callback) -> None:
        """Run `call` in this thread once the ticket is done."""
        post = self._post
        assert post is not None, "copies are under way, and nothing listens"
        ticket.when_done(lambda: post(call))
