"""One decode step for all lanes that decode: a token for each, or a round of speculation.

Knows generations and their lanes, but neither the queue nor prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from luceasync.engine.acceptance import (
    Acceptance,
    Decide,
    catch_up,
    end_without_token,
    matching_child,
    permitted,
    take_best,
)
from luceasync.engine.sampling.choose import is_checked, nothing, rank
from luceasync.engine.sampling.row import RowSampling, is_edited, is_greedy
from luceasync.engine.sequence import Generation
from luceasync.errors import DraftFailed
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.passes import MAX_STOPS, LaneText
from luceasync.ranking.logits import NO_TOKEN, Logits
from luceasync.request import Speculation
from luceasync.speculation.choice import RoundPlan
from luceasync.speculation.drafter import Anchor, LiveText
from luceasync.speculation.speculator import QueuedRound, Speculator
from luceasync.status import SpeculationStatus


class LaneDecoding(Protocol):
    """How lanes decode."""

    @property
    def status(self) -> SpeculationStatus | None:
        """None without a draft."""
        ...

    def speculation(self, lane: int) -> Speculation | None:
        """Speculation figures of the choice on the lane; None without a draft."""
        ...

    def start(self, lane: int) -> None:
        """An empty lane is assigned to another choice."""
        ...

    def prefilled(self, lane: int, begin: int, num_tokens: int) -> None:
        """The target has just prefilled tokens `[begin, begin + num_tokens)` of the lane."""
        ...

    def step(
        self,
        generations: Sequence[Generation],
        *,
        alone: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        """Give each generation at least one token, or end it. Its lane then holds every token but
        the last. `alone`: nothing else has work. `meanwhile` is called at least once, when
        everything is queued on the devices and the host would otherwise wait for them."""
        ...


class PlainDecoding:
    """One token a step."""

    def __init__(self, target: LayerSplitBackend) -> None:
        self._target = target

    @property
    def status(self) -> None:
        return None

    def speculation(self, lane: int) -> None:
        return None

    def start(self, lane: int) -> None:
        """No-op: no state is kept per lane."""

    def prefilled(self, lane: int, begin: int, num_tokens: int) -> None:
        """No-op."""

    def step(
        self,
        generations: Sequence[Generation],
        *,
        alone: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        logits = _run(self._target, anchors_of(generations))
        is_likely = alone and all(map(takes_best_twice, generations))

        def then() -> None:
            if is_likely:  # the next step: devices begin it without waiting for the host
                self._target.run_ahead()
            meanwhile()

        choose_next(generations, logits, then)


class SpeculativeDecoding:
    """Runs rounds of speculation on lanes where they pay, and plain steps of one token on the
    others."""

    def __init__(
        self,
        target: LayerSplitBackend,
        speculator: Speculator,
        decide: Decide = matching_child,
        force: Callable[[Sequence[int]], RoundPlan] | None = None,
    ) -> None:
        """`decide`: see speculator.walk. `force`, for measurements: returns the plan of a step for
        these lanes; None: the plan that pays best."""
        self._target = target
        self._speculator = speculator
        self._decide = decide
        self._force = force
        self._queued: _QueuedStep | None = None

    @property
    def status(self) -> SpeculationStatus:
        return self._speculator.status

    def speculation(self, lane: int) -> Speculation:
        return self._speculator.speculation(lane)

    def start(self, lane: int) -> None:
        if self._queued is not None:
            self._queued.forget(lane)
        self._speculator.start(lane)

    def prefilled(self, lane: int, begin: int, num_tokens: int) -> None:
        self._speculator.prefilled(lane, begin, num_tokens)

    def step(
        self,
        generations: Sequence[Generation],
        *,
        alone: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        generations = self._take_queued(generations, alone=alone, meanwhile=meanwhile)
        if not generations:
            return
        anchors = anchors_of(generations)
        lanes = [a.lane for a in anchors]
        plan = self._plan(anchors, lanes, alone=alone)
        pairs = list(zip(generations, anchors, strict=True))

        def foresee() -> None:
            meanwhile()
            self._speculator.foresee(lanes, plan, alone=alone)

        is_plain = alone and not plan.speculating and all(map(takes_best_twice, generations))

        def run_ahead() -> None:
            if is_plain and self._speculator.is_plain_next(lanes):
                self._target.run_ahead()  # the devices begin it without waiting for the host
            meanwhile()
            if not plan.speculating:
                self._speculator.foresee(lanes, plan, alone=alone)

        for run, is_round, then in ((self._round, True, foresee), (self._plain, False, run_ahead)):
            part = [(g, a) for g, a in pairs if (a.lane in plan.speculating) == is_round]
            if not part:
                continue
            chosen, places = zip(*part, strict=True)
            is_free = (
                is_round and self._decide is matching_child and all(map(self._is_free, chosen))
            )
            try:
                if is_free and self._whole_round(chosen, plan, meanwhile, alone=alone):
                    continue
                run(chosen, places, plan, then)
            except DraftFailed:  # before any work was done: these generations get a plain token
                self._plain(chosen, places, plan, meanwhile)

    def _is_free(self, generation: Generation) -> bool:
        """Whether the device may accept its tokens without the host: it takes the best tokens, and
        its ends are single tokens."""
        prepared = generation.prepared
        return (
            takes_best(generation)
            and len(prepared.stop_ids) <= MAX_STOPS
            and (self._target.keeps_ends or not prepared.detokenizer.has_stops)
        )

    def _plan(self, anchors: Sequence[Anchor], lanes: Sequence[int], *, alone: bool) -> RoundPlan:
        if self._force is not None:
            return self._force(lanes)
        promises = self._speculator.promises(anchors)
        return self._speculator.plan(lanes, alone=alone, promises=promises)

    def _round(
        self,
        generations: Sequence[Generation],
        anchors: Sequence[Anchor],
        plan: RoundPlan,
        meanwhile: Callable[[], None],
    ) -> None:
        self._speculator.round(anchors, plan, Acceptance(generations, self._decide, meanwhile))

    def _plain(
        self,
        generations: Sequence[Generation],
        anchors: Sequence[Anchor],
        plan: RoundPlan,
        meanwhile: Callable[[], None],
    ) -> None:
        started_at = time.perf_counter()
        logits = _run(self._target, anchors)
        self._speculator.decoded(anchors, plan)
        choose_next(generations, logits, meanwhile)
        self._speculator.timed(len(anchors), plan, time.perf_counter() - started_at)

    def _whole_round(
        self,
        generations: Sequence[Generation],
        plan: RoundPlan,
        meanwhile: Callable[[], None],
        *,
        alone: bool,
    ) -> bool:
        """Run a round that needs nothing from the host. Returns False, without side effects, if no
        such round is possible."""
        queued = self._speculator.queue([*map(_text_of, generations)], plan)
        if queued is not None:
            step = _QueuedStep(queued, generations)
            self._take(step, generations, alone=alone, meanwhile=meanwhile)
        return queued is not None

    def _take_queued(
        self,
        generations: Sequence[Generation],
        *,
        alone: bool,
        meanwhile: Callable[[], None],
    ) -> Sequence[Generation]:
        """Deliver the tokens of the round in flight to the generations that it was queued for.
        Returns the other generations."""
        step, self._queued = self._queued, None
        if step is None:
            return generations
        others = [g for g in generations if g not in step.generations]
        if len(others) == len(generations):  # it was queued for texts that have ended since
            meanwhile = nothing  # a step for these generations is to be queued first
        self._take(step, generations, alone=alone, meanwhile=meanwhile)
        return others

    def _take(
        self,
        step: _QueuedStep,
        asked: Sequence[Generation],
        *,
        alone: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        """Queue the next round if all lanes are likely to go on. Then wait for this one, and give
        its tokens to every generation that it was queued for, even those not in `asked`."""
        after = None
        if alone and self._force is None and step.is_likely_followed(asked):
            anchors = anchors_of([g for g in step.generations if g is not None])
            after = self._speculator.queue_after(step.queued, anchors, alone=alone)
        meanwhile()
        tokens = self._speculator.arrived(step.queued)
        taken: list[tuple[int, int] | None] = []  # begin, and how many rows stand
        for lane, generation, given in zip(
            step.queued.lanes, step.generations, tokens, strict=True
        ):
            if generation is None or generation.has_ended or generation.lane != lane:
                taken.append(None)
                continue
            taken.append((generation.position, take_best(generation, given)))
            generation.is_ahead = after is not None and not generation.has_ended
        self._speculator.settle(step.queued, taken, tokens, after)
        if after is not None:
            self._queued = _QueuedStep(after, step.generations)


class _QueuedStep:
    """A round in flight, and the generations that it was queued for."""

    def __init__(self, queued: QueuedRound, generations: Sequence[Generation | None]) -> None:
        self.queued = queued
        self.generations = list(generations)

    def forget(self, lane: int) -> None:
        """The lane is assigned to another choice."""
        if lane in self.queued.lanes:
            self.generations[self.queued.lanes.index(lane)] = None

    def is_likely_followed(self, asked: Sequence[Generation]) -> bool:
        """Whether the round was queued for exactly the generations `asked`, and it is unlikely that
        all of them end in it."""
        shape = self.queued.plan.shape
        assert shape is not None, "a round has a shape"
        return len(asked) == len(self.generations) and all(
            g is not None and g in asked and g.num_generated + shape.block < g.prepared.max_tokens
            for g in self.generations
        )


def takes_best(generation: Generation) -> bool:
    """Whether the generation takes the best tokens unchanged, with or without speculation."""
    prepared, request = generation.prepared, generation.prepared.request
    return (
        prepared.guide is None
        and request.top_logprobs is None
        and is_greedy(request.sampling)
        and not is_edited(request.sampling)
    )


def takes_best_twice(generation: Generation) -> bool:
    """Whether it takes the best tokens of this step and the next, unless it stops before. After a
    stop the device runs one superfluous step: its row lies behind the lane's end and is never read.
    """
    goes_on = generation.num_generated + 1 < generation.prepared.max_tokens
    return goes_on and takes_best(generation)


def _text_of(generation: Generation) -> LaneText:
    """The text on its lane, and the tokens that end it."""
    prepared, token = generation.prepared, generation.last_token
    assert token is not None, "it decodes"
    num_left = prepared.max_tokens - generation.num_generated
    stops = tuple(prepared.stop_ids)
    return LaneText(generation.on_lane, generation.position, token, num_left, stops)


def anchors_of(generations: Sequence[Generation]) -> list[Anchor]:
    """The position and last token of each; all of them decode."""
    anchors = []
    for g in generations:
        assert g.lane is not None and g.last_token is not None
        copies = None if g.prepared.copies is None else g.prepared.copies.found
        text = None if copies is None else LiveText(g.lease.sequence, copies)
        anchors.append(Anchor(g.lane, g.position, g.last_token, text))
    return anchors


def choose_next(
    generations: Sequence[Generation], logits: Logits, meanwhile: Callable[[], None] = nothing
) -> None:
    """Sample a token for each generation from its row of logits, and append it. `meanwhile`: see
    luceasync.engine.sampling.choose.rank.
    """
    rows = [_masked_row(g) for g in generations]

    def then() -> None:
        catch_up(generations)
        meanwhile()

    ranked = rank(logits, rows, meanwhile=then)
    chosen = permitted(generations, rows, ranked, logits)
    for g, (token, logprobs) in zip(generations, chosen, strict=True):
        if token == NO_TOKEN:
            end_without_token(g)
        else:
            g.append(token, logprobs)


def _masked_row(generation: Generation) -> RowSampling:
    """How the next token is to be chosen; masked, unless the guide checks the token afterwards."""
    row, guide = generation.next_row, generation.guide
    return row if guide is None or is_checked(row) else replace(row, mask=guide.mask())


def _run(target: LayerSplitBackend, anchors: Sequence[Anchor]) -> Logits:
    """Run a decode pass; the logits after each anchor."""
    lanes, positions, tokens = zip(*((a.lane, a.position, a.token) for a in anchors), strict=True)
    return target.decode(lanes, positions, tokens)
