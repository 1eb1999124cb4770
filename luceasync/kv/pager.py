"""Which chunks of which lane are on the devices, when lanes have fewer pages than chunks. Pure.

The one authority: decides what moves, and whoever acts says what has come of it. Knows where each
lane stands and how much of it host memory holds, but no node, no device and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from luceasync.kv.pages import CHUNK_TOKENS, PageEvent, num_chunks
from luceasync.kv.residency import NoVictim, Residency, ResidencyChange, chunks_of

MARGIN = 1.25  # what a chunk must be worth beside the one whose page it takes
MOVED_SHARE = 4  # of the pages one part changes hands at a time, at most

Span = tuple[int, int]  # tokens [begin, end)


@dataclass(frozen=True, slots=True)
class Growth:
    """What it takes to give a lane room. `unsaved`: tokens that must be in host memory before."""

    lane: int
    unsaved: Span | None
    change: ResidencyChange


@dataclass(frozen=True, slots=True)
class PageMove:
    """Chunks that leave, as events, and what comes in their stead: (chunk, page)."""

    gone: tuple[PageEvent, ...]
    coming: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PagerCounts:
    """How often what has happened to a lane, or to all of them."""

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
    """`held_end`: host memory has the tokens before it, of which those `own` for this lane alone;
    `exact_end`: those from it on were computed while something was absent. `coming`: chunks whose
    pages are being filled, so that they are not listed yet.
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
    """The maps of all lanes. See luceasync.kv.pages.PageMap for lanes that hold everything."""

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
        """`batch_tokens`: what a lane grows by at most at a time; `tau_tokens`: see `is_due`;
        `pins`: of every lane. Raises NoVictim where these are too many.
        """
        self._tau_tokens = tau_tokens
        self._pins = tuple(pins)
        batch = num_chunks(batch_tokens)
        self._lanes = [_Lane(Residency(num_pages, order, batch)) for _ in range(num_lanes)]
        self._num_most = max(1, num_pages // MOVED_SHARE)
        self._past = PagerCounts()  # of what lanes held before
        for lane in range(num_lanes):
            self._begin(lane, ())

    def __repr__(self) -> str:
        return f"KvFlashPager({[lane.residency for lane in self._lanes]})"

    # --- what a lane has -------------------------------------------------------------------------

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def pages(self, lane: int) -> tuple[int, ...]:
        """The pages of the lane's resident chunks, in order of chunk."""
        held = self._lanes[lane].residency.pages
        return tuple(held[chunk] for chunk in sorted(held))

    def num_resident(self, lane: int) -> int:
        """Chunks of the lane that have a page."""
        return len(self._lanes[lane].residency.pages)

    def num_absent(self, lane: int) -> int:
        """Chunks of the lane that no decode step sees now."""
        of_lane = self._lanes[lane]
        return of_lane.residency.num_absent + len(of_lane.coming)

    def counts(self, lane: int) -> PagerCounts:
        """What has happened since the lane was empty."""
        return self._lanes[lane].counts

    @property
    def totals(self) -> PagerCounts:
        """What has happened to all lanes."""
        total = self._past
        for lane in self._lanes:
            total = total.plus(lane.counts)
        return total

    def exact_end(self, lane: int, end: int) -> int:
        """How many of the lane's first `end` tokens are what full attention makes of them."""
        return int(min(end, self._lanes[lane].exact_end))

    @property
    def num_own_tokens(self) -> int:
        """Tokens that are in host memory for their lane alone, in no node that others know."""
        return sum(end - begin for lane in self._lanes for begin, end in lane.own)

    def ledger(self, lane: int, end: int) -> list[tuple[bool, float]]:
        """Of each chunk of the lane's first `end` tokens whether it is here, and what it is worth;
        not a number where nobody has said it.
        """
        residency = self._lanes[lane].residency
        return [
            (chunk in residency.pages, residency.scores.get(chunk, math.nan))
            for chunk in range(num_chunks(end))
        ]

    # --- room for tokens -------------------------------------------------------------------------

    def grows(self, lane: int, num_tokens: int) -> Growth | None:
        """What it takes to have room for the lane's first `num_tokens` tokens; None: it is there.
        Raises NoVictim.
        """
        residency = self._lanes[lane].residency
        if num_chunks(num_tokens) <= residency.num_chunks:
            return None
        return self._growth(lane, residency.extension(num_chunks(num_tokens)))

    def clears(self, lane: int, num_tokens: int) -> Growth | None:
        """What it takes to have pages at hand for so many tokens, of which not all may be kept;
        None: they are. Raises NoVictim.
        """
        change = self._lanes[lane].residency.clearing(num_chunks(num_tokens))
        return self._growth(lane, change) if change.evicted else None

    def _growth(self, lane: int, change: ResidencyChange) -> Growth:
        of_lane = self._lanes[lane]
        end = (max(change.evicted, default=-1) + 1) * CHUNK_TOKENS
        unsaved = (of_lane.held_end, end) if end > of_lane.held_end else None
        return Growth(lane, unsaved, change)

    def grown(self, growth: Growth) -> list[PageEvent]:
        """It is done, and what was unsaved is in host memory: the events that tell of it."""
        of_lane, change = self._lanes[growth.lane], growth.change
        assert not of_lane.coming, f"lane {growth.lane}: what is coming is to be listed first"
        of_lane.residency.apply(change)
        if growth.unsaved is not None:
            self.saved(growth.lane, *growth.unsaved)
        self._count(growth.lane, evicted=len(change.evicted))
        gone = [PageEvent(growth.lane, chunk, None) for chunk in change.evicted]
        return gone + [PageEvent(growth.lane, *given) for given in change.given]

    # --- what becomes of a lane ------------------------------------------------------------------

    def release(self, lane: int) -> None:
        """Nothing is in the lane any more, and nothing of it in host memory. Its pins are gone."""
        self._begin(lane, ())

    def pin(self, lane: int, spans: Sequence[Span]) -> None:
        """Have the chunks of these tokens stay, whenever they come. Raises NoVictim; nothing has
        changed then.
        """
        of_lane = self._lanes[lane]
        of_lane.residency.pin(chunks_of(spans, CHUNK_TOKENS))
        of_lane.pins = (*of_lane.pins, *spans)

    def is_pinned(self, lane: int, chunk: int) -> bool:
        """Whether the chunk stays once it is here."""
        return chunk in self._lanes[lane].residency.pinned

    def restored(
        self, lane: int, num_tokens: int, ledger: Sequence[tuple[bool, float]]
    ) -> list[PageEvent]:
        """The lane is to stand after so many tokens, all of which host memory holds. Its pins stay.
        Which chunks are given pages, as events: those of most worth by `ledger`, see there.
        """
        self._begin(lane, self._lanes[lane].pins)
        of_lane = self._lanes[lane]
        residency = of_lane.residency
        of_lane.held_end = of_lane.probed_at = num_tokens
        residency.value({c: s for c, (_, s) in enumerate(ledger) if not math.isnan(s)})
        change = residency.placement(num_chunks(num_tokens))
        residency.apply(change)
        return [PageEvent(lane, *given) for given in change.given]

    def held(self, lane: int, begin: int, end: int) -> None:
        """Host memory holds these tokens of the lane as a node, and no more for the lane alone."""
        of_lane = self._lanes[lane]
        of_lane.own = tuple(own for own in of_lane.own if own[0] < begin or own[1] > end)
        if begin <= of_lane.held_end:
            of_lane.held_end = max(of_lane.held_end, end)

    def decoded(self, lane: int, begin: int) -> None:
        """Tokens from `begin` on were computed from what is here alone."""
        if self.num_absent(lane):
            of_lane = self._lanes[lane]
            of_lane.exact_end = min(of_lane.exact_end, begin)

    # --- probes ----------------------------------------------------------------------------------

    def is_due(self, lane: int, num_tokens: int) -> bool:
        """Whether the lane, which has committed so many tokens, is to be looked at: every tau of
        them, as long as something is absent.
        """
        of_lane = self._lanes[lane]
        gone_by = num_tokens - of_lane.probed_at
        return gone_by >= self._tau_tokens and bool(self.num_absent(lane))

    def unsaved(self, lane: int, num_tokens: int) -> Span | None:
        """Whole chunks of the lane's first tokens that host memory lacks."""
        begin, end = self._lanes[lane].held_end, num_tokens // CHUNK_TOKENS * CHUNK_TOKENS
        return (begin, end) if begin < end else None

    def saved(self, lane: int, begin: int, end: int) -> None:
        """These tokens are in host memory, for the lane alone."""
        of_lane = self._lanes[lane]
        of_lane.held_end = end
        of_lane.own = (*of_lane.own, (begin, end))

    def probe_started(self, lane: int, num_tokens: int) -> None:
        """A look at the lane begins, where it stands after so many tokens."""
        self._lanes[lane].probed_at = num_tokens
        self._count(lane, probes=1)

    def value(self, lane: int, masses: Sequence[float]) -> None:
        """The mass that each chunk of the lane was found to have is what it is worth now."""
        self._lanes[lane].residency.value(dict(enumerate(masses)))

    def selects(self, lane: int) -> Growth:
        """What it takes to have those chunks here that are worth most: some take the pages of
        others.
        """
        return self._growth(lane, self._lanes[lane].residency.reselection(MARGIN, self._num_most))

    def selected(self, selection: Growth) -> PageMove:
        """It is done, as far as `grown` asks for it: what moves. It is `coming` until `listed`."""
        of_lane, change = self._lanes[selection.lane], selection.change
        gone = self.grown(replace(selection, change=replace(change, given=())))
        residency = of_lane.residency
        residency.apply(replace(change, evicted=(), version=residency.version))
        of_lane.coming = change.given
        self._count(selection.lane, recalled=len(change.given))
        return PageMove(tuple(gone), change.given)

    def listed(self, lane: int) -> list[PageEvent]:
        """What was coming has come: the events that tell of it."""
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


__all__ = ["PagerCounts", "Growth", "KvFlashPager", "PageMove", "NoVictim"]
