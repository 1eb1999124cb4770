"""Speculative decoding on one page: propose, verify, accept, commit, absorb.

Owns what each lane's text has shown of speculation. Knows no requests and no text: an Acceptor
decides which verified rows stand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from luceasync.models.inference import inference_mode
from luceasync.pipeline.passes import ComingTokens, DeviceRounds, LaneText
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import Proposal
from luceasync.request import Speculation
from luceasync.speculation.choice import (
    RETRY_TOKENS,
    AcceptanceRecord,
    LaneOutlook,
    Promises,
    RoundKinds,
    RoundPlan,
    RoundShape,
    StepCosts,
    pays,
    plan_step,
    without_context,
)
from luceasync.speculation.drafter import Anchor, Drafter, DraftInRounds, Target
from luceasync.status import DrafterStatus, SpeculationStatus

ROUNDS_A_PLAN = 4  # in a row: one more hardly changes what pays, and planning takes the host long


class Acceptor(Protocol):
    """Decides which verified rows stand; luceasync.engine.acceptance.Acceptance is one."""

    @property
    def arrived_at(self) -> float:
        """When the verified rows arrived on the host, by time.perf_counter."""
        ...

    def fit(self, proposal: Proposal, most_rows: int) -> Proposal:
        """The proposal to verify, of the same shape: tokens that are known to come may replace
        proposed ones. No path gets more than `most_rows` rows.
        """
        ...

    def __call__(self, proposal: Proposal, logits: Logits) -> list[list[int]]:
        """The rows to commit for each entry, row 0 first. logits: of [entries, rows]."""
        ...


@dataclass(slots=True)
class LaneTally:
    """Counts of one choice's speculation, by one drafter or by all."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, num_proposed: int, num_accepted: int) -> None:
        self.rounds += 1
        self.proposed += num_proposed
        self.accepted += num_accepted

    def summary(self, off_reason: str | None) -> Speculation:
        return Speculation(self.rounds, self.proposed, self.accepted, off_reason)


@dataclass(slots=True)
class SpeculationTotals:
    """All rounds since the start, a tree's rows of one depth counting as one slot.

    By the host's clock, without waiting for a device: `draft_s` until the proposal is queued,
    `verify_s` from there until its logits are on the host, `host_s` what choosing, walking and
    committing take after that. On a CPU these are the parts themselves; on a GPU `verify_s` holds
    the device's time for the proposal too.
    """

    num_slots: int
    rounds: int = 0
    proposed: list[int] = field(init=False)
    accepted: list[int] = field(init=False)
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    drafters: dict[str, LaneTally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.proposed, self.accepted = [0] * self.num_slots, [0] * self.num_slots

    def add(self, drafter: str, num_proposed: int, num_slots: int, num_accepted: int) -> None:
        """Count a lane's round; `num_slots` depths were proposed."""
        self.rounds += 1
        self.drafters.setdefault(drafter, LaneTally()).add(num_proposed, num_accepted)
        for slot in range(num_slots):
            self.proposed[slot] += 1
        for slot in range(num_accepted):
            self.accepted[slot] += 1

    def summary(self) -> SpeculationStatus:
        return SpeculationStatus(
            self.rounds,
            tuple(self.proposed),
            tuple(self.accepted),
            self.draft_s,
            self.verify_s,
            self.host_s,
            drafters={
                name: DrafterStatus(tally.rounds, tally.proposed, tally.accepted)
                for name, tally in self.drafters.items()
            },
        )


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """The plan to return if `plan` is called for these lanes next, and nothing is promised."""

    lanes: tuple[int, ...]
    alone: bool
    plan: RoundPlan


@dataclass(slots=True)
class QueuedRound:
    """A round that needs nothing of the host, until its tokens are read. `ends`: the most tokens of
    each lane after it; `begun_at`: when it was queued, or the round before it ended; `is_timed`:
    that says what such a round takes; `num_more` rounds may follow by the same plan.
    """

    lanes: tuple[int, ...]
    plan: RoundPlan
    rounds: DeviceRounds
    part: DraftInRounds
    coming: ComingTokens
    ends: list[int]
    begun_at: float
    is_timed: bool
    num_more: int
    ended_at: float = 0.0


class Speculator:
    """Rounds of speculation for lanes of one target. Synchronous; engine thread only."""

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter],
        num_lanes: int,
        costs: StepCosts | None = None,
        ahead_s: float = 0.0,
    ) -> None:
        """`drafters`: one at most does not promise. `costs` None: measured as they come up."""
        self._target = target
        self.drafters = tuple(drafters)
        self._by_name = {drafter.name: drafter for drafter in drafters}
        self._tapped = [d.tapped for d in drafters if d.tapped is not None]
        [*self._recorded] = (d for d in drafters if not d.promises)
        assert len(self._recorded) <= 1, "records are kept for one drafter"
        self._promising = [d for d in drafters if d.promises]
        promised = tuple(shape for d in self._promising for shape in d.shapes)
        recorded = self._recorded[0].shapes if self._recorded else ()
        self._kinds = RoundKinds(recorded, promised, ahead_s)
        self._outlooks = [LaneOutlook()] * num_lanes
        self._tallies = [LaneTally()] * num_lanes
        self._off_reasons: list[str | None] = [None] * num_lanes  # of promising drafters
        self.common = AcceptanceRecord()  # of all lanes so far: the prior of a new one
        self._num_slots = max(shape.block for shape in self._kinds.all) - 1
        self._totals = SpeculationTotals(self._num_slots)
        self._all_costs = self._costs = costs or StepCosts()
        self._is_settled = True  # the last plain step
        self._foreseen: _Foreseen | None = None

    def beside(self, drafter: Drafter) -> Speculator:
        """Another speculator for the same lanes, with one drafter more."""
        return self._with((*self.drafters, drafter))

    def rehearsing(self) -> Speculator:
        """The same for these lanes, while this one has none. What steps cost is shared."""
        return self._with(self.drafters)

    def _with(self, drafters: Sequence[Drafter]) -> Speculator:
        costs = self._all_costs, self._kinds.ahead_s
        return Speculator(self._target, drafters, len(self._outlooks), *costs)

    @property
    def shapes(self) -> tuple[RoundShape, ...]:
        """Of all rounds that may come."""
        return self._kinds.all

    @property
    def status(self) -> SpeculationStatus:
        """Totals since the start; for the seconds see SpeculationTotals."""
        reasons = (drafter.off_reason for drafter in self.drafters)
        return replace(self._totals.summary(), off_reason=next(filter(None, reasons), None))

    def speculation(self, lane: int) -> Speculation:
        """What speculation did for the choice on `lane`, and why it is off if it is."""
        off_reason = self._outlooks[lane].off_reason if self._recorded else self._off_reasons[lane]
        return self._tallies[lane].summary(off_reason)

    def refresh(self) -> None:
        """Let go of drafters that are known to be gone, and take up those that are back."""
        for drafter in self.drafters:
            drafter.refresh()

    def check_alive(self) -> None:
        """Find out whether all drafters are still there. Call while nothing runs."""
        for drafter in self.drafters:
            drafter.check_alive()

    @inference_mode
    def start(self, lane: int) -> None:
        """Begin another choice on the lane, which is empty."""
        self._foreseen = None
        self._outlooks[lane] = LaneOutlook.of_new_text(self.common)
        self._tallies[lane], self._off_reasons[lane] = LaneTally(), None
        for drafter in self.drafters:
            drafter.start(lane)

    @inference_mode
    def restored(self, lane: int, end: int, *, with_features: bool) -> None:
        """Note that the lane ends at `end` after a restored prefix, `with_features` or without."""
        self._foreseen = None
        if not with_features:
            for tapped in self._tapped:
                tapped.reset(lane, end)
            self._outlooks[lane] = without_context(self._num_slots, "restored without features")

    @inference_mode
    def prefilled(self, lane: int, begin: int, num_tokens: int) -> None:
        """Absorb positions `[begin, begin + num_tokens)`, which the target has just prefilled."""
        if (off_reason := self._off_reason()) is not None:
            self._outlooks[lane] = without_context(self._num_slots, off_reason)
            return
        for tapped in self._tapped:
            self._target.send_chunk_taps(tapped, lane, begin, num_tokens)

    # --- steps ----------------------------------------------------------------------------------

    def promises(self, anchors: Sequence[Anchor]) -> list[Promises]:
        """What drafters that know it promise of the next round, for each lane. Until it is called
        again, costs are those of contexts as long as these.
        """
        self._costs = self._all_costs.at(max(anchor.position for anchor in anchors))
        return [
            {
                drafter.name: promise
                for drafter in self._promising
                if (promise := drafter.promise(anchor)) is not None
            }
            for anchor in anchors
        ]

    def plan(
        self, lanes: Sequence[int], *, alone: bool, promises: Sequence[Promises] = ()
    ) -> RoundPlan:
        """The next step for decoding `lanes`, which it names by number. `alone`: nothing else runs
        beside it, so that its time can be measured. `promises`: of each lane; none at all: nothing
        is promised.
        """
        foreseen, self._foreseen = self._foreseen, None
        kinds, outlooks = self._kinds, [self._outlooks[lane] for lane in lanes]
        if (off_reason := self._off_reason()) is not None:
            kinds = replace(kinds, recorded=())
            for lane in lanes:
                self._outlooks[lane] = without_context(self._num_slots, off_reason)
        elif (
            foreseen is not None
            and (foreseen.lanes, foreseen.alone) == (tuple(lanes), alone)
            and not self._pays_any(promises, len(lanes))
        ):
            return foreseen.plan
        plan = plan_step(outlooks, kinds, self._costs, measure=alone, promises=promises)
        return RoundPlan(
            plan.shape,
            tuple(lanes[i] for i in plan.speculating),
            plan.is_measured,
            {lanes[i]: why for i, why in plan.off_reasons.items()},
            {lanes[i]: name for i, name in plan.others.items()},
            {lanes[i]: num_tokens for i, num_tokens in plan.retries.items()},
        )

    def foresee(self, lanes: Sequence[int], under_way: RoundPlan, *, alone: bool) -> None:
        """Plan the step after the one under way, for the same lanes, while a device works on that.
        One round more hardly changes what pays, unless it is the one that measures it.
        """
        if self._recorded and not self._costs.is_due(len(lanes), under_way.shape):
            plan = self.plan(lanes, alone=alone)
            self._foreseen = _Foreseen(tuple(lanes), alone, plan)

    def is_plain_next(self, lanes: Sequence[int]) -> bool:
        """Whether the step after the one under way will be a plain one for these lanes, which
        decode plainly in this one, whatever token each gets.
        """
        if self._recorded:
            return False
        after = (drafter.promise_after(lane) for drafter in self._promising for lane in lanes)
        found = [{"": promise} for promise in after if promise is not None]
        return not self._pays_any(found, len(lanes))

    def _pays_any(self, promises: Sequence[Promises], num_lanes: int) -> bool:
        return any(
            pays(promise, num_lanes, self._kinds, self._costs)
            for of_lane in promises
            for promise in of_lane.values()
        )

    @inference_mode
    def round(
        self, anchors: Sequence[Anchor], plan: RoundPlan, accept: Acceptor
    ) -> list[list[int]]:
        """Run one round for lanes that speculate as planned. Returns the rows committed for each
        lane, as many as tokens were emitted. Raises DraftFailed before anything has changed.
        """
        shape = plan.shape
        assert shape is not None, "a round has a shape"
        started_at, num_unsettled = time.perf_counter(), self._num_unsettled
        lanes, begins = [a.lane for a in anchors], [a.position for a in anchors]
        proposal = accept.fit(self._propose(anchors, plan, shape), shape.block)
        proposed_at = time.perf_counter()
        logits = self._target.verify(lanes, begins, proposal.tokens, proposal.parents)
        paths = accept(proposal, logits)
        self._target.commit(paths)
        for tapped in self._tapped:
            self._target.send_taps(tapped, lanes, begins, paths, shape.block)
        self._count(lanes, plan, shape, paths)
        ended_at = time.perf_counter()
        self._totals.draft_s += proposed_at - started_at
        self._totals.verify_s += accept.arrived_at - proposed_at
        self._totals.host_s += ended_at - accept.arrived_at
        if plan.is_measured and self._num_unsettled == num_unsettled:
            self._costs.observe(len(lanes), shape, ended_at - started_at)
        return paths

    # --- rounds that need nothing of the host ---------------------------------------------------

    @inference_mode
    def queue(self, texts: Sequence[LaneText], plan: RoundPlan) -> QueuedRound | None:
        """Queue a round as planned for lanes that take the best tokens. None, and nothing is
        queued, if the host has to take part in it: then call `round`.
        """
        begun_at, shape = time.perf_counter(), plan.shape
        assert shape is not None, "a round has a shape"
        drafter, ends = self._by_name[shape.drafter], [t.begin + shape.block for t in texts]
        if plan.others or self._tapped != [drafter.tapped]:
            return None
        if (part := drafter.in_rounds(shape, max(ends))) is None:
            return None
        num_unsettled = self._num_unsettled
        rounds = self._target.device_rounds(part.work, len(texts))
        if rounds is None:
            return None
        lanes = tuple(text.lane for text in texts)
        part.begin(lanes, [text.begin for text in texts])
        rounds.start(texts)
        coming = self._target.queue_round(rounds, lanes, ends)
        if coming is None:
            return None
        self._totals.draft_s += time.perf_counter() - begun_at
        is_timed = self._num_unsettled == num_unsettled
        timing = begun_at, is_timed, ROUNDS_A_PLAN - 1
        return QueuedRound(lanes, plan, rounds, part, coming, ends, *timing)

    @inference_mode
    def queue_after(
        self, queued: QueuedRound, anchors: Sequence[Anchor], *, alone: bool
    ) -> QueuedRound | None:
        """Queue the round after a queued one whose tokens have not been read. None, and nothing is
        queued, unless the plan for these lanes would be the same if the next round were planned now
        that they stand at `anchors`: a copy that begins in the round under way is one round late.
        """
        plan, shape = queued.plan, queued.plan.shape
        assert shape is not None, "a round has a shape"
        promises = self.promises(anchors) if self._promising else ()
        if self._costs.is_due(len(queued.lanes), shape):
            return None
        if not queued.num_more or any(promises):
            self._foreseen = None
            plan = self.plan(queued.lanes, alone=alone, promises=promises)
            if (plan.shape, plan.speculating) != (shape, queued.lanes) or plan.others:
                if not any(promises):
                    self._foreseen = _Foreseen(queued.lanes, alone, plan)
                return None
        ends = [end + shape.block for end in queued.ends]
        if self._by_name[shape.drafter].in_rounds(shape, max(ends)) is not queued.part:
            return None  # another graph
        coming = self._target.queue_round(queued.rounds, queued.lanes, ends)
        if coming is None:
            return None
        more = (queued.num_more or ROUNDS_A_PLAN) - 1
        after = replace(queued, plan=plan, coming=coming, ends=ends, num_more=more)
        after.is_timed = True
        return after

    def arrived(self, queued: QueuedRound) -> list[list[int]]:
        """The tokens that each of its lanes gets; waits for them."""
        tokens = queued.coming.fetch()
        queued.ended_at = time.perf_counter()
        return tokens[: len(queued.lanes)]

    def settle(
        self,
        queued: QueuedRound,
        taken: Sequence[tuple[int, int] | None],
        tokens: Sequence[Sequence[int]],
        after: QueuedRound | None,
    ) -> None:
        """`tokens` arrived, and of each lane, which began there, so many rows stand; None: its text
        had ended. `after`: the round that was queued behind it.
        """
        shape = queued.plan.shape
        assert shape is not None, "a round has a shape"
        more = 0 if after is None else shape.block
        for i, (lane, given) in enumerate(zip(queued.lanes, tokens, strict=True)):
            if (stands := taken[i]) is None:
                continue
            begin, num_kept = stands
            queued.ends[i] = begin + len(given)
            queued.part.kept(lane, begin, num_kept, queued.ends[i] + more)
            self._count([lane], queued.plan, shape, [range(num_kept)])
        if after is not None:
            after.ends = [end + more for end in queued.ends]
            after.begun_at = queued.ended_at
        seconds = queued.ended_at - queued.begun_at
        self._totals.verify_s += seconds
        self._totals.host_s += time.perf_counter() - queued.ended_at
        if queued.plan.is_measured and queued.is_timed and None not in taken:
            self._costs.observe(len(queued.lanes), shape, seconds)

    def _propose(self, anchors: Sequence[Anchor], plan: RoundPlan, shape: RoundShape) -> Proposal:
        """The rows of a round: those of the shape's drafter, but for lanes where others propose."""
        proposal = self._by_name[shape.drafter].propose(anchors, shape)
        for name in dict.fromkeys(plan.others.values()):
            entries = [i for i, a in enumerate(anchors) if plan.others.get(a.lane) == name]
            if entries:
                rows = self._by_name[name].propose([anchors[i] for i in entries], shape)
                proposal = proposal.with_entries(entries, rows)
        return proposal

    @inference_mode
    def decoded(self, anchors: Sequence[Anchor], plan: RoundPlan) -> None:
        """Absorb tokens that the target has just decoded in a plain step, as planned."""
        lanes, begins = [a.lane for a in anchors], [a.position for a in anchors]
        num_unsettled = self._num_unsettled
        if all(drafter.off_reason is None for drafter in self._recorded):
            for tapped in self._tapped:
                self._target.send_taps(tapped, lanes, begins, [[0]] * len(lanes), 1)
        self._is_settled = self._num_unsettled == num_unsettled
        for lane in lanes:
            off_reason = self._off_reasons[lane] = plan.off_reasons.get(lane)
            if self._recorded and off_reason is not None:
                retry_after = plan.retries.get(lane, RETRY_TOKENS)
                self._outlooks[lane] = self._outlooks[lane].after_plain(off_reason, retry_after)

    def timed(self, num_lanes: int, plan: RoundPlan, seconds: float) -> None:
        """Note how long that step took, until its tokens were chosen."""
        if plan.is_measured and self._is_settled:
            self._costs.observe(num_lanes, None, seconds)

    @property
    def _num_unsettled(self) -> int:
        return sum(drafter.num_unsettled for drafter in self.drafters)

    def _off_reason(self) -> str | None:
        """Why the drafter whose rounds are recorded proposes nothing."""
        for drafter in self._recorded:
            drafter.refresh()
            return drafter.off_reason
        return None

    def _count(
        self,
        lanes: Sequence[int],
        plan: RoundPlan,
        shape: RoundShape,
        paths: Sequence[Sequence[int]],
    ) -> None:
        for lane, path in zip(lanes, paths, strict=True):
            drafter = self._by_name[plan.others.get(lane, shape.drafter)]
            num_proposed, num_accepted = drafter.num_proposed(lane, shape), len(path) - 1
            self._off_reasons[lane] = None
            if not num_proposed:  # its rows were padding
                continue
            if drafter.promises:
                num_slots = max(num_proposed, num_accepted)
            else:
                num_slots = shape.block - 1
                self._outlooks[lane] = self._outlooks[lane].after_round(shape, num_accepted)
                self.common = self.common.after(shape, num_accepted)
            self._tallies[lane].add(num_proposed, num_accepted)
            self._totals.add(drafter.name, num_proposed, num_slots, num_accepted)
