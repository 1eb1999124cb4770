"""Paging of lanes that have fewer pages than their context has chunks.

Carries out KvFlashPager's plans: saves rows before they leave, notifies stages, recalls chunks
while passes run, and probes lanes. Chunks move after a fixed number of tokens, not when a copy
happens to end, so a slow copy changes no token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from luceasync.errors import LaneMemoryExhausted, StageFailed
from luceasync.host_cache.nodes import Nodes, NodesInParts, Span
from luceasync.kv.pager import Growth, KvFlashPager
from luceasync.kv.pages import CHUNK_TOKENS, PageMap
from luceasync.nodes import NodeKey
from luceasync.pipeline.paging import (
    Keep,
    Ledger,
    MakeReady,
    PageEventSender,
    Paging,
    Pins,
    ProbeSource,
    WholeLanes,
    keep_if_room,
)
from luceasync.pipeline.passes import Passes
from luceasync.pipeline.plan import Plan
from luceasync.request import Residence
from luceasync.status import ResidenceStatus

REST = 3  # pause after a probe, in multiples of its duration: a probe slows steps while it runs
LIST_SHARE = 8  # recalled chunks are listed tau / LIST_SHARE tokens later, when most have arrived


@dataclass(slots=True)
class _Probe:
    """A lane's probe. It began at `begun_at` tokens and time `begun_s`. `is_first`: the prompt's
    own probe, whose result the first step waits for. `is_scored`: its result has been taken.
    `listed_at`: the number of tokens from which on recalled chunks are listed.
    """

    begun_at: int | None = None
    is_first: bool = False
    is_scored: bool = False
    begun_s: float = 0.0
    listed_at: int = 0


@dataclass(slots=True)
class _Lane:
    probe: _Probe = field(default_factory=_Probe)
    ledger: Ledger = ()


class PagedLanes:
    """Paging by a KvFlashPager."""

    def __init__(
        self,
        pager: KvFlashPager,
        passes: Passes,
        nodes: Callable[[MakeReady], NodesInParts],
        *,
        max_ctx_tokens: int,
        tau_tokens: int,
    ) -> None:
        self._pager = pager
        self._passes = passes
        self._place = PageEventSender(passes)
        self._parts = nodes(self._make_ready)
        self._num_lanes = pager.num_lanes
        self._max_ctx_tokens = max_ctx_tokens
        self._tau_tokens = tau_tokens
        self._source: ProbeSource | None = None
        self._rested_at_s = 0.0  # no probe begins before this time
        self._keep: Keep = keep_if_room
        self._lanes: dict[int, _Lane] = {}
        self._names = itertools.count()

    @property
    def nodes(self) -> Nodes:
        return self._parts

    def probe_with(self, source: ProbeSource) -> None:
        self._source = source

    def keep_with(self, keep: Keep) -> None:
        self._keep = keep

    @property
    def own_bytes(self) -> int:
        return self._pager.num_own_tokens * self._parts.sizes.token_bytes

    # --- room ------------------------------------------------------------------------------------

    def make_room(self, lane: int, num_tokens: int) -> None:
        self._grow(self._pager.plan_growth(lane, num_tokens))

    def have_room(self, lanes: Sequence[int], begins: Sequence[int]) -> bool:
        return False  # `before_steps` determines what each step needs

    def before_steps(self, lanes: Sequence[int], begins: Sequence[int], num_rows: int) -> None:
        for lane, begin in zip(lanes, begins, strict=True):
            if begin >= self._of(lane).probe.listed_at:
                self._list(lane)
                self._select(lane, begin)
            self._grow(self._pager.plan_clearing(lane, min(begin + num_rows, self._max_ctx_tokens)))
            self._pager.mark_decoded(lane, begin)

    def _grow(self, growth: Growth | None) -> None:
        if growth is not None:
            self._list(growth.lane)
            if growth.unsaved is not None:
                self._save(growth.lane, *growth.unsaved)
            self._place(self._pager.apply_growth(growth))

    def _save(self, lane: int, begin: int, end: int) -> None:
        """Save these tokens, which no node holds, to host memory for the lane alone. Raises
        LaneMemoryExhausted.
        """
        node, span = NodeKey(b"lane %d" % next(self._names)), Span(begin, end, with_state=False)
        num_bytes = sum(self._parts.sizes.of(span))
        if not self._keep(lambda: self._parts.save(lane, node, span), num_bytes):
            raise LaneMemoryExhausted(lane, num_bytes)
        self._parts.hold(lane, node, end)
        self._parts.drop(node)  # the lane's hold keeps the memory

    # --- transitions of a lane -------------------------------------------------------------------

    def prefilled(self, lane: int, num_tokens: int) -> None:
        """Start the prompt's probe; the first step moves chunks by its result."""
        self._start_probe(lane, num_tokens, is_first=True)

    def reset(self, lane: int) -> None:
        self._pager.release(lane)
        self._lanes.pop(lane, None)
        self._passes.reset(lane)
        self._parts.release(lane)

    @torch.inference_mode()
    def vacate(self, lane: int) -> None:
        """Empty the lane and free its host memory."""
        # A failed stage is reported by the next call that needs it; then all lanes restart.
        with suppress(StageFailed):
            self.reset(lane)

    def node_saved(self, lane: int, node: NodeKey, span: Span) -> None:
        self._parts.hold(lane, node, span.end)
        self._pager.mark_in_node(lane, span.begin, span.end)

    def exact_end(self, lane: int, end: int) -> int:
        return self._pager.exact_end(lane, end)

    def pin(self, lane: int, spans: Pins) -> None:
        self._pager.pin(lane, spans)

    def expect_restore(self, lane: int, ledger: Ledger) -> None:
        self._of(lane).ledger = ledger

    @torch.inference_mode()
    def ledger(self, lane: int, end: int) -> Ledger:
        probe = self._of(lane).probe
        if probe.begun_at is not None and probe.is_first:
            self._score(lane, probe)
        return self._pager.ledger(lane, end)

    def residence(self, lane: int) -> Residence:
        pager, counts = self._pager, self._pager.counts(lane)
        return Residence(
            pager.num_resident(lane) * CHUNK_TOKENS,
            pager.num_absent(lane) * CHUNK_TOKENS,
            counts.recalled,
            counts.evicted,
            counts.probes,
        )

    @property
    def status(self) -> ResidenceStatus:
        lanes, totals = [self.residence(i) for i in range(self._num_lanes)], self._pager.totals
        return ResidenceStatus(
            sum(lane.resident_tokens for lane in lanes),
            sum(lane.absent_tokens for lane in lanes),
            self.own_bytes,
            totals.recalled,
            totals.evicted,
            totals.probes,
        )

    @torch.inference_mode()
    def _make_ready(self, lane: int, num_tokens: int, nodes: Sequence[NodeKey]) -> None:
        """Prepare the lane for the restore of `nodes`, up to `num_tokens`. Pins stay."""
        ledger = self._of(lane).ledger
        self._lanes.pop(lane)
        self._passes.reset(lane)
        self._parts.release(lane)
        for node in nodes:
            self._parts.hold(lane, node, min(self._parts.span(node).end, num_tokens))
        self._place(self._pager.restore(lane, num_tokens, ledger))

    # --- probes ----------------------------------------------------------------------------------

    def _select(self, lane: int, num_tokens: int) -> None:
        """Take a probe's result tau tokens after it began, and begin a probe if one is due."""
        probe = self._of(lane).probe
        if probe.begun_at is not None and (
            probe.is_first or num_tokens - probe.begun_at >= self._tau_tokens
        ):
            self._move(lane, probe)
            probe.listed_at = num_tokens + self._tau_tokens // LIST_SHARE * (not probe.is_first)
        others = (of_lane.probe for of_lane in self._lanes.values())
        # One probe at a time, since they share a bus.
        is_free = all(other.begun_at is None or other.is_first for other in others)
        is_rested = time.perf_counter() >= self._rested_at_s
        if (
            probe.begun_at is None
            and is_free
            and is_rested
            and self._pager.is_due(lane, num_tokens)
        ):
            self._start_probe(lane, num_tokens, is_first=False)

    def _start_probe(self, lane: int, num_tokens: int, *, is_first: bool) -> None:
        if self._source is not None and self._pager.num_absent(lane):
            probe = self._of(lane).probe
            probe.begun_at, probe.begun_s = num_tokens, time.perf_counter()
            probe.is_first, probe.is_scored = is_first, False
            self._pager.probe_started(lane, num_tokens)
            unsaved = None if is_first else self._pager.unsaved(lane, num_tokens)
            if unsaved is not None:  # rows in host memory do not move while the probe reads them
                # Without room for these rows, the probe reads the pages.
                with suppress(LaneMemoryExhausted):
                    self._save(lane, *unsaved)
                    self._pager.mark_saved(lane, *unsaved)
            self._source.start_probe(lane, num_tokens)

    def _score(self, lane: int, probe: _Probe) -> None:
        """Wait for the probe's result and score the lane's chunks by it, once."""
        if probe.is_scored:
            return
        assert self._source is not None, "a probe is running"
        probe.is_scored = True
        found = self._source.attention_mass(lane)
        self._rested_at_s = probe.begun_s + REST * found.seconds
        self._pager.score(lane, found.of_chunks.tolist())

    def _move(self, lane: int, probe: _Probe) -> None:
        """Evict and recall chunks by the probe's result."""
        self._score(lane, probe)
        probe.begun_at = None
        selection = self._pager.plan_selection(lane)
        if selection.unsaved is not None:
            self._save(lane, *selection.unsaved)
        move = self._pager.apply_selection(selection)
        self._place(move.gone)
        if move.coming:
            self._passes.recall(lane, move.coming)
        if probe.is_first:  # worth a wait before the first token after a prompt
            self._list(lane)

    def _list(self, lane: int) -> None:
        """Make recalled chunks visible to steps; the stages wait for the copies."""
        self._place(self._pager.list_recalled(lane))

    def _of(self, lane: int) -> _Lane:
        return self._lanes.setdefault(lane, _Lane())


def paging_of(
    plan: Plan,
    passes: Passes,
    nodes: Callable[[MakeReady], NodesInParts],
    page_order: Sequence[int] | None = None,
) -> Paging:
    """The plan's paging. `nodes`: makes the lanes' nodes, given the function that prepares a lane
    for a restore; `page_order`: the order in which a lane's pages are first handed out."""
    pool = plan.pool
    if pool is None:
        return WholeLanes(PageMap(plan.parallel, plan.num_pages, page_order), passes, nodes)
    pager = KvFlashPager(
        plan.parallel,
        plan.num_pages,
        batch_tokens=plan.batch_tokens,
        tau_tokens=pool.tau_tokens,
        pins=pool.pins,
        order=page_order,
    )
    lanes = PagedLanes(
        pager, passes, nodes, max_ctx_tokens=plan.max_ctx_tokens, tau_tokens=pool.tau_tokens
    )
    if pool.policy == "qk":
        lanes.probe_with(passes)
    return lanes
