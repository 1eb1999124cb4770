"""Decides which chunks of which lane are on the devices when lanes have fewer pages than chunks.

A `plan_*` method returns what a step requires; the caller does this, which may fail, and then calls
the matching `apply_*`. Pure: knows how far each lane is and how much of it host memory holds, but
no node, no device and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from luceasync.kv.pages import CHUNK_TOKENS, PageEvent, num_chunks
from luceasync.kv.residency import NoVictim, Residency, ResidencyChange, chunks_of

MARGIN = 1.25  # a recalled chunk must be worth this many times the chunk it replaces
MOVED_SHARE = 4  # at most 1 / MOVED_SHARE of the pages change hands at a time

Span = tuple[int, int]  # tokens [begin, end)


@dataclass(frozen=True, slots=True)
class Growth:
    """A planned change of a lane's pages. `unsaved`: tokens to copy to host memory first."""

    lane: int
    unsaved: Span | None
    change: ResidencyChange


@dataclass(frozen=True, slots=True)
class PageMove:
    """Events for the chunks that leave, and the chunks to recall in their place: (chunk, page)."""

    gone: tuple[PageEvent, ...]
    coming: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PagerCounts:
    """Counts of what happened to one lane, or to all."""

    recalled: int = 0
    evicted: int = 0
    probes: int = 0

    def plus(self, other: PagerCounts) -> PagerCounts:
        return PagerCounts(
            self.recalled + other.recalled,
            self.evicted + other.evicted,
            self.probes + other.probes,
        )


@dataclass(slots=True)
class _Lane:
    """`held_end`: host memory holds all tokens before it, those in `own` for this lane alone.
    `exact_end`: tokens from here on were computed while chunks were absent. `coming`: chunks being
    copied to their pages; decode steps do not see them until they are listed.
    """

    residency: Residency
    held_end: int = 0
    own: tuple[Span, ...] = ()
    exact_end: float = math.inf
    coming: tuple[tuple[int, int], ...] = ()
    probed_at: int = 0
    pins: tuple[Span, ...] = ()
    ledger: Mapping[int, float] = field(default_factory=dict)
    counts: PagerCounts = PagerCounts()


class KvFlashPager:
    """Residency of all lanes; lanes that hold their whole context use kv.pages.PageMap."""

    def __init__(
        self,
        num_lanes: int,
        num_pages: int,
        *,
        batch_tokens: int,
        tau_tokens: int,
        pins: Sequence[Span] = (),
        order: Sequence[int] | None = None,
    ) -> None:
        """`batch_tokens`: most tokens that a lane grows by at once; `tau_tokens`: tokens between
        probes; `pins`: spans pinned in every lane. Raises NoVictim if there are too many."""
        self._tau_tokens = tau_tokens
        self._pins = tuple(pins)
        batch = num_chunks(batch_tokens)
        self._lanes = [_Lane(Residency(num_pages, order, batch)) for _ in range(num_lanes)]
        self._num_most = max(1, num_pages // MOVED_SHARE)
        self._past = PagerCounts()  # of sequences that have left their lanes
        for lane in range(num_lanes):
            self._begin(lane, ())

    def __repr__(self) -> str:
        return f"KvFlashPager({[lane.residency for lane in self._lanes]})"

    # --- state of a lane -------------------------------------------------------------------------

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def pages(self, lane: int) -> tuple[int, ...]:
        """Pages of the lane's resident chunks, in chunk order."""
        held = self._lanes[lane].residency.pages
        return tuple(held[chunk] for chunk in sorted(held))

    def num_resident(self, lane: int) -> int:
        """Chunks of the lane with a page."""
        return len(self._lanes[lane].residency.pages)

    def num_absent(self, lane: int) -> int:
        """Chunks of the lane that decode steps cannot see now."""
        of_lane = self._lanes[lane]
        return of_lane.residency.num_absent + len(of_lane.coming)

    def counts(self, lane: int) -> PagerCounts:
        """Counts since the lane was last empty."""
        return self._lanes[lane].counts

    @property
    def totals(self) -> PagerCounts:
        """Counts of all lanes since the start."""
        total = self._past
        for lane in self._lanes:
            total = total.plus(lane.counts)
        return total

    def exact_end(self, lane: int, end: int) -> int:
        """How many of the lane's first `end` tokens equal full attention's."""
        return int(min(end, self._lanes[lane].exact_end))

    @property
    def num_own_tokens(self) -> int:
        """Tokens that host memory holds for their lane alone, outside all nodes."""
        return sum(end - begin for lane in self._lanes for begin, end in lane.own)

    def ledger(self, lane: int, end: int) -> list[tuple[bool, float]]:
        """(is resident, score) of each chunk of the lane's first `end` tokens; NaN: not scored."""
        residency = self._lanes[lane].residency
        return [
            (chunk in residency.pages, residency.scores.get(chunk, math.nan))
            for chunk in range(num_chunks(end))
        ]

    # --- growth ----------------------------------------------------------------------------------

    def plan_growth(self, lane: int, num_tokens: int) -> Growth | None:
        """Plan pages for the lane's first `num_tokens` tokens; None if it has them. Raises
        NoVictim.
        """
        residency = self._lanes[lane].residency
        if num_chunks(num_tokens) <= residency.num_chunks:
            return None
        return self._growth(lane, residency.extension(num_chunks(num_tokens)))

    def plan_clearing(self, lane: int, num_tokens: int) -> Growth | None:
        """Plan evictions so that there are free pages for `num_tokens` tokens, although not all of
        these may be kept; None if there are already. Raises NoVictim."""
        change = self._lanes[lane].residency.clearing(num_chunks(num_tokens))
        return self._growth(lane, change) if change.evicted else None

    def _growth(self, lane: int, change: ResidencyChange) -> Growth:
        of_lane = self._lanes[lane]
        end = (max(change.evicted, default=-1) + 1) * CHUNK_TOKENS
        unsaved = (of_lane.held_end, end) if end > of_lane.held_end else None
        return Growth(lane, unsaved, change)

    def apply_growth(self, growth: Growth) -> list[PageEvent]:
        """Apply the plan, whose unsaved tokens are in host memory now. Returns its events."""
        of_lane, change = self._lanes[growth.lane], growth.change
        assert not of_lane.coming, f"lane {growth.lane}: list recalled chunks first"
        of_lane.residency.apply(change)
        if growth.unsaved is not None:
            self.mark_saved(growth.lane, *growth.unsaved)
        self._count(growth.lane, evicted=len(change.evicted))
        gone = [PageEvent(growth.lane, chunk, None) for chunk in change.evicted]
        return gone + [PageEvent(growth.lane, *given) for given in change.given]

    # --- transitions of a lane -------------------------------------------------------------------

    def release(self, lane: int) -> None:
        """Empty the lane: free its pages, forget its tokens in host memory and its pins."""
        self._begin(lane, ())

    def pin(self, lane: int, spans: Sequence[Span]) -> None:
        """Keep the chunks of these tokens resident from when they first have pages. Raises
        NoVictim; nothing has changed then.
        """
        of_lane = self._lanes[lane]
        of_lane.residency.pin(chunks_of(spans, CHUNK_TOKENS))
        of_lane.pins = (*of_lane.pins, *spans)

    def is_pinned(self, lane: int, chunk: int) -> bool:
        """Whether the chunk is pinned."""
        return chunk in self._lanes[lane].residency.pinned

    def restore(
        self, lane: int, num_tokens: int, ledger: Sequence[tuple[bool, float]]
    ) -> list[PageEvent]:
        """Set the lane to `num_tokens` tokens, all of which are in host memory, and give pages to
        the chunks with the highest scores in `ledger`. Pins stay. Returns the events."""
        self._begin(lane, self._lanes[lane].pins)
        of_lane = self._lanes[lane]
        residency = of_lane.residency
        of_lane.held_end = of_lane.probed_at = num_tokens
        residency.score_all({c: s for c, (_, s) in enumerate(ledger) if not math.isnan(s)})
        change = residency.placement(num_chunks(num_tokens))
        residency.apply(change)
        return [PageEvent(lane, *given) for given in change.given]

    def mark_in_node(self, lane: int, begin: int, end: int) -> None:
        """Record that these tokens of the lane are in a node now, and no longer held for the lane
        alone."""
        of_lane = self._lanes[lane]
        of_lane.own = tuple(own for own in of_lane.own if own[0] < begin or own[1] > end)
        if begin <= of_lane.held_end:
            of_lane.held_end = max(of_lane.held_end, end)

    def mark_decoded(self, lane: int, begin: int) -> None:
        """Record that tokens from `begin` on were computed from the resident chunks alone."""
        if self.num_absent(lane):
            of_lane = self._lanes[lane]
            of_lane.exact_end = min(of_lane.exact_end, begin)

    # --- probes ----------------------------------------------------------------------------------

    def is_due(self, lane: int, num_tokens: int) -> bool:
        """Whether the lane, at `num_tokens` committed tokens, is due for a probe: every tau tokens
        while chunks are absent.
        """
        of_lane = self._lanes[lane]
        num_since = num_tokens - of_lane.probed_at
        return num_since >= self._tau_tokens and bool(self.num_absent(lane))

    def unsaved(self, lane: int, num_tokens: int) -> Span | None:
        """The span of whole chunks that host memory lacks; None if there is none."""
        begin, end = self._lanes[lane].held_end, num_tokens // CHUNK_TOKENS * CHUNK_TOKENS
        return (begin, end) if begin < end else None

    def mark_saved(self, lane: int, begin: int, end: int) -> None:
        """Record that these tokens are in host memory, held for the lane alone."""
        of_lane = self._lanes[lane]
        of_lane.held_end = end
        of_lane.own = (*of_lane.own, (begin, end))

    def probe_started(self, lane: int, num_tokens: int) -> None:
        """Count a probe, which began at `num_tokens` tokens."""
        self._lanes[lane].probed_at = num_tokens
        self._count(lane, probes=1)

    def score(self, lane: int, attention_mass: Sequence[float]) -> None:
        """Score each chunk of the lane by its attention mass."""
        self._lanes[lane].residency.score_all(dict(enumerate(attention_mass)))

    def plan_selection(self, lane: int) -> Growth:
        """Plan to swap absent chunks of high score for resident ones of low score."""
        return self._growth(lane, self._lanes[lane].residency.reselection(MARGIN, self._num_most))

    def apply_selection(self, selection: Growth) -> PageMove:
        """Apply the plan: evict now, recall in the background. Recalled chunks are `coming` until
        `list_recalled`.
        """
        of_lane, change = self._lanes[selection.lane], selection.change
        gone = self.apply_growth(replace(selection, change=replace(change, given=())))
        residency = of_lane.residency
        residency.apply(replace(change, evicted=(), version=residency.version))
        of_lane.coming = change.given
        self._count(selection.lane, recalled=len(change.given))
        return PageMove(tuple(gone), change.given)

    def list_recalled(self, lane: int) -> list[PageEvent]:
        """Make recalled chunks visible to decode steps. Returns their events."""
        of_lane = self._lanes[lane]
        coming, of_lane.coming = of_lane.coming, ()
        return [PageEvent(lane, *given) for given in coming]

    # ---------------------------------------------------------------------------------------------

    def _begin(self, lane: int, pins: tuple[Span, ...]) -> None:
        before = self._lanes[lane]
        self._past = self._past.plus(before.counts)
        before.residency.clear()
        self._lanes[lane] = _Lane(before.residency)
        self.pin(lane, pins or self._pins)

    def _count(self, lane: int, *, recalled: int = 0, evicted: int = 0, probes: int = 0) -> None:
        of_lane = self._lanes[lane]
        of_lane.counts = of_lane.counts.plus(PagerCounts(recalled, evicted, probes))


__all__ = ["Growth", "KvFlashPager", "NoVictim", "PageMove", "PagerCounts"]
