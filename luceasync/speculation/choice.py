"""How far to speculate: which rows the next pass verifies, and for which lanes.

Pure: decides from measured costs and accepted rows. Knows no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

TRIAL_ROUNDS = 8  # of a lane, before its own text decides
SHORT_TRIAL_ROUNDS = 2  # the same where earlier rounds, or those of other lanes, say what to expect
RETRY_TOKENS = 256  # decoded plainly before speculation is retried on a lane
MOST_RETRY_TOKENS = 2048  # the same where rounds are far from paying, see _retry_after
RETRIED_SHARE = 0.004  # of a text's time, which may be lost by trying again
REFILL_TOKENS = 64  # the same for a lane that started without features
LEAST_GAIN = 1.05  # for which a round is run: of many estimates the best one is too good
FEW_ROUNDS = 4.0  # which do not say enough of a depth
PRIOR_ROUNDS = 4.0  # the weight of what other lanes saw, or this one long ago
WINDOW_ROUNDS = 24.0  # older rounds hardly count

NUM_SAMPLES = 8  # of each kind of step
NUM_MEASURED = 3  # the first is dropped: kernels may have been compiled or graphs captured
FIRST_WAIT_STEPS = 16  # until it is measured again: the first times may have been outliers
STALE_STEPS = 1000  # at most until then, as costs grow with the context
HOPELESS_WAITS = 8  # times as long, if twice the tokens that it gains would not pay for a round
FALLEN = 0.8  # of what a step took: the others are measured again, too
LENGTHS = (4096, 16384, 65536)  # tokens of the longest context from which costs are kept apart


class RoundShape(NamedTuple):
    """A round's fixed sizes and its drafter: the draft runs `block` rows, its known first token
    included; `budget` rows of a tree are verified after the anchor, None: the chain.
    """

    block: int
    budget: int | None = None
    drafter: str = "dflash"

    @property
    def num_rows(self) -> int:
        """Rows that are verified."""
        return self.block if self.budget is None else self.budget + 1


def shapes_for(block: int, budget: int | None) -> tuple[RoundShape, ...]:
    """The few shapes of rounds, largest first; each is captured once. Chains are for load: a tree
    pays only while the device would idle.
    """
    blocks = sorted({block, max(2, -(-block // 2)), min(4, block), 2}, reverse=True)
    tree = () if budget is None else (RoundShape(block, budget),)
    return (*tree, *(RoundShape(b) for b in blocks))


@dataclass(frozen=True, slots=True)
class DepthRates:
    """How often rows of each depth are accepted: of about `rounds[i]` rounds that proposed a row
    at depth i + 1, `hits[i]` accepted one. Older rounds weigh less.
    """

    hits: tuple[float, ...] = ()
    rounds: tuple[float, ...] = ()

    def after(self, num_slots: int, num_accepted: int) -> DepthRates:
        """With one more round of `num_slots` depths. What deeper ones have shown grows old too."""
        keep = 1 - 1 / WINDOW_ROUNDS
        missing = (0.0,) * (num_slots - len(self.hits))
        hits, rounds = list(self.hits + missing), list(self.rounds + missing)
        for i in range(len(hits)):
            hits[i] = hits[i] * keep + (num_accepted > i)
            rounds[i] = rounds[i] * keep + (i < num_slots)
        return DepthRates(tuple(hits), tuple(rounds))

    def taus(self, num_slots: int) -> list[float]:
        """The expected tokens of a round of 0, 1, ... `num_slots` slots, bonus included. Depths
        that were not tried are extrapolated: they fall off as fast as those before. As far as only
        a few rounds have tried them so are others: else a first round that accepts nothing would
        say for ever that deeper ones are in vain.
        """
        share, shares = 1.0, []
        for i in range(num_slots):
            expected = share ** (1 + 1 / i) if i else 1.0
            if i < len(self.hits):
                weight = max(0.0, FEW_ROUNDS - self.rounds[i]) if i else 0.0
                hits, rounds = self.hits[i] + weight * expected, self.rounds[i] + weight
                expected = hits / rounds
            share = min(share, expected)
            shares.append(share)
        return list(accumulate(shares, initial=1.0))

    def as_prior(self) -> DepthRates:
        """The same rates, with the weight of few rounds."""
        scales = [min(1.0, PRIOR_ROUNDS / r) for r in self.rounds]
        hits = tuple(h * s for h, s in zip(self.hits, scales, strict=True))
        return DepthRates(hits, tuple(r * s for r, s in zip(self.rounds, scales, strict=True)))


@dataclass(frozen=True, slots=True)
class AcceptanceRecord:
    """What rounds have accepted, chains and trees apart."""

    chain: DepthRates = DepthRates()
    tree: DepthRates = DepthRates()

    def after(self, shape: RoundShape, num_accepted: int) -> AcceptanceRecord:
        """With one more round."""
        if shape.budget is None:
            return AcceptanceRecord(self.chain.after(shape.block - 1, num_accepted), self.tree)
        return AcceptanceRecord(self.chain, self.tree.after(shape.block - 1, num_accepted))

    def taus(self, shapes: Sequence[RoundShape]) -> list[float]:
        """The expected tokens of a round of each shape, bonus included. Before the first tree,
        trees are expected to do what chains do.
        """
        num_slots = max(shape.block for shape in shapes) - 1
        chain = self.chain.taus(num_slots)
        tree = self.tree.taus(num_slots) if self.tree.hits else chain
        return [(chain if s.budget is None else tree)[s.block - 1] for s in shapes]

    def as_prior(self) -> AcceptanceRecord:
        return AcceptanceRecord(self.chain.as_prior(), self.tree.as_prior())

    def first_share(self) -> float | None:
        """The share of first proposed tokens that were accepted, of chains and trees; None: too few
        rounds have shown it.
        """
        kinds = [rates for rates in (self.chain, self.tree) if rates.rounds]
        rounds = sum(rates.rounds[0] for rates in kinds)
        if rounds < TRIAL_ROUNDS:
            return None
        return sum(rates.hits[0] for rates in kinds) / rounds

    @property
    def num_rounds(self) -> float:
        """How many rounds it has of one kind; older ones count less."""
        return max((0.0, *self.chain.rounds[:1], *self.tree.rounds[:1]))


@dataclass(frozen=True, slots=True)
class Promise:
    """What a drafter expects of the rows that it has for a lane now: `taus[n]` tokens of a round of
    n slots, bonus included. It has no more rows than that.
    """

    taus: Sequence[float]

    def tau(self, shape: RoundShape) -> float:
        """The expected tokens of a round of this shape."""
        return self.taus[min(shape.block, len(self.taus)) - 1]


Promises = Mapping[str, Promise]  # of one lane, by drafter


@dataclass(frozen=True, slots=True)
class LaneOutlook:
    """What to expect of a lane's text. It speculates for `num_trials` more rounds in any case.
    `num_plain` tokens were decoded since it was turned off for `off_reason`, of `retry_after`.
    """

    record: AcceptanceRecord = AcceptanceRecord()
    num_trials: int = TRIAL_ROUNDS
    num_plain: int = 0
    off_reason: str | None = None
    retry_after: int = RETRY_TOKENS

    @classmethod
    def of_new_text(cls, common: AcceptanceRecord) -> LaneOutlook:
        """`common`: what the rounds of all lanes have shown."""
        is_known = common.num_rounds >= TRIAL_ROUNDS
        return cls(common.as_prior(), SHORT_TRIAL_ROUNDS if is_known else TRIAL_ROUNDS)

    def after_round(self, shape: RoundShape, num_accepted: int) -> LaneOutlook:
        return LaneOutlook(self.record.after(shape, num_accepted), max(0, self.num_trials - 1))

    def after_plain(self, off_reason: str, retry_after: int = RETRY_TOKENS) -> LaneOutlook:
        """After a token that was decoded plainly, since speculation does not pay. What the first
        one says holds until it is tried again.
        """
        if self.off_reason is None:
            return replace(self, off_reason=off_reason, retry_after=retry_after, num_plain=1)
        if self.num_plain + 1 >= self.retry_after:
            return LaneOutlook(self.record.as_prior(), SHORT_TRIAL_ROUNDS)
        return replace(self, num_plain=self.num_plain + 1)


def without_context(num_slots: int, off_reason: str) -> LaneOutlook:
    """The outlook of a lane that the drafter has seen nothing of: none, until it has decoded some
    tokens.
    """
    nothing = DepthRates((0.0,) * num_slots, (PRIOR_ROUNDS,) * num_slots)
    return LaneOutlook(AcceptanceRecord(nothing, nothing), 0, 0, off_reason, REFILL_TOKENS)


class StepCosts:
    """Seconds of steps, by number of lanes and shape: the lower quartile of the latest, since a
    step may be delayed and is never early. Of contexts of one range of lengths: see `at`. Steps may
    take less and less at first, while slots fill with experts: what is seldom measured falls, too.
    """

    def __init__(self, shorter: StepCosts | None = None) -> None:
        """`shorter`: of shorter contexts."""
        self._shorter = shorter
        self._longer: StepCosts | None = None
        self._samples: dict[tuple[int, RoundShape | None], deque[float]] = {}
        self._seconds: dict[RoundShape | None, dict[int, float]] = {}  # by number of lanes
        self._num_seen: dict[tuple[int, RoundShape | None], int] = {}
        self._measured_at: dict[tuple[int, RoundShape | None], int] = {}
        self._num_steps = 0
        self._before: dict[tuple[int, RoundShape | None], float] = {}  # when others were measured

    def at(self, num_tokens: int) -> StepCosts:
        """The costs of steps whose longest context has so many tokens."""
        costs = self
        for begin in LENGTHS:
            if num_tokens < begin:
                break
            if costs._longer is None:
                costs._longer = StepCosts(costs)
            costs = costs._longer
        return costs

    def observe(self, num_lanes: int, shape: RoundShape | None, seconds: float) -> None:
        """Count a step that nothing else ran beside; `shape` None: a plain one."""
        key = (num_lanes, shape)
        self._num_steps += 1
        self._measured_at[key] = self._num_steps
        self._num_seen[key] = self.num_seen(num_lanes, shape) + 1
        if self._num_seen[key] < 2:
            return
        if self._num_seen[key] == 2:
            self._samples[key] = deque(maxlen=NUM_SAMPLES)
        samples = self._samples[key]
        samples.append(seconds)
        usual_s = sorted(samples)[len(samples) // 4]
        self._seconds.setdefault(shape, {})[num_lanes] = usual_s
        if len(samples) == NUM_SAMPLES and usual_s < FALLEN * self._before.setdefault(key, usual_s):
            self._before[key] = usual_s
            others = {each: min(1, num) for each, num in self._num_seen.items() if each != key}
            self._num_seen |= others

    def seconds(self, num_lanes: int, shape: RoundShape | None) -> float | None:
        """Seconds of one step for `num_lanes` lanes; `shape` None: a plain step. The nearest number
        of lanes stands in for others, larger ones first; then those of shorter contexts, as many
        plain steps as there. None if nothing comparable was measured.
        """
        known = self._seconds.get(shape)
        if not known:
            return self._as_shorter(num_lanes, shape)
        if num_lanes in known:
            return known[num_lanes]
        return known[min(known, key=lambda lanes: (abs(lanes - num_lanes), -lanes))]

    def _as_shorter(self, num_lanes: int, shape: RoundShape | None) -> float | None:
        if self._shorter is None:
            return None
        there = self._shorter.seconds(num_lanes, shape)
        if there is None or not self._seconds.get(None) or shape is None:
            return there
        plain_s, plain_there = self.seconds(num_lanes, None), self._shorter.seconds(num_lanes, None)
        return there * plain_s / plain_there if plain_s and plain_there else there

    def is_due(self, num_lanes: int, shape: RoundShape | None, num_waits: int = 1) -> bool:
        """Whether to measure it: too rarely so far, or long ago. The interval grows each time.
        `num_waits`: so many times as long ago.
        """
        num_more = self.num_seen(num_lanes, shape) - NUM_MEASURED
        if num_more < 0:
            return True
        wait_steps: int = num_waits * min(STALE_STEPS, FIRST_WAIT_STEPS * 4 ** min(num_more, 5))
        return self._num_steps - self._measured_at[num_lanes, shape] > wait_steps

    def num_seen(self, num_lanes: int, shape: RoundShape | None) -> int:
        """How often it was measured, the first time included."""
        return self._num_seen.get((num_lanes, shape), 0)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The next step: a round of `shape` for the lanes `speculating` (indices), and a plain step for
    the others. `others`, by index: lanes whose rows come from another drafter than the shape's.
    `off_reasons`, by index: why speculation does not pay; `retries`: after how many tokens it is
    tried again. `is_measured`: measure its time.
    """

    shape: RoundShape | None
    speculating: tuple[int, ...]
    is_measured: bool
    off_reasons: dict[int, str] = field(default_factory=dict)
    others: dict[int, str] = field(default_factory=dict)
    retries: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundKinds:
    """The shapes that a plan chooses from, largest first. `recorded`: of a drafter whose rounds on
    a lane tell what the next one will give; `promised`: of drafters that know it of each round.
    `ahead_s`: what a round has to gain besides, as it keeps plain steps from being begun ahead.
    """

    recorded: tuple[RoundShape, ...] = ()
    promised: tuple[RoundShape, ...] = ()
    ahead_s: float = 0.0

    def worth_s(self, plain_s: float | None) -> float:
        """The seconds of a round that give a token, where a plain step takes `plain_s`."""
        return plain_s / (LEAST_GAIN + self.ahead_s / plain_s) if plain_s else 0.0

    @property
    def all(self) -> tuple[RoundShape, ...]:
        return (*self.recorded, *self.promised)


def plan_step(
    outlooks: Sequence[LaneOutlook],
    kinds: RoundKinds,
    costs: StepCosts,
    *,
    measure: bool,
    promises: Sequence[Promises] = (),
) -> RoundPlan:
    """The step with the most tokens per second: a round for all lanes, a round for those that it
    pays for and a plain step for the rest, or a plain step for all, unless a lane is on trial.

    `measure`: a cost that is due is measured first. `promises`: of each lane, or none at all.
    """
    num_lanes = len(outlooks)
    everyone = tuple(range(num_lanes))
    promises = promises or ({},) * num_lanes
    promised = [shape for shape in kinds.promised if any(shape.drafter in p for p in promises)]
    if measure:
        due = [
            *(s for s in kinds.recorded if _is_due(s, outlooks, costs)),
            *((None,) if costs.is_due(num_lanes, None) else ()),
            *(s for s in promised if _is_copy_due(s, promises, costs)),
        ]
        if due:
            return RoundPlan(due[0], everyone if due[0] is not None else (), measure)
    plain_s = costs.seconds(num_lanes, None)
    if not kinds.recorded and plain_s is not None:
        found = _nothing_pays(promised, promises, costs, kinds.worth_s(plain_s))
        if found is not None:
            return RoundPlan(None, (), measure, found)
    shapes = [*kinds.recorded, *promised]
    known = {s: cost for s in shapes if (cost := costs.seconds(num_lanes, s)) is not None}
    if kinds.recorded and (plain_s is None or not known):
        return RoundPlan(kinds.recorded[0], everyone, measure)
    if plain_s is None:
        return RoundPlan(None, (), measure)
    recorded = [shape for shape in kinds.recorded if shape in known]
    of_lanes = [outlook.record.taus(recorded) for outlook in outlooks] if recorded else []
    taus = dict(zip(recorded, zip(*of_lanes, strict=True), strict=True))
    worth_s = kinds.worth_s(plain_s)
    offers = [_Offer.of(s, taus.get(s), outlooks, promises, c / worth_s) for s, c in known.items()]
    chosen, speculating = _best(offers, everyone, costs, num_lanes / worth_s)
    if chosen is None and any(o.num_trials for o in outlooks):
        # Of the drafter that is on trial: copies would try nothing, and so for ever.
        tried = [replace(offer, others={}) for offer in offers[: len(recorded)]]
        chosen, speculating = _best(tried, everyone, costs, 0.0)
    off = [i for i in everyone if i not in speculating] if offers else []
    off_reasons = {i: _why_off(i, offers) for i in off}
    retries = {i: _retry_after(i, offers[: len(recorded)]) for i in off}
    if chosen is None:
        return RoundPlan(None, (), measure, off_reasons, retries=retries)
    others = {i: name for i, name in chosen.others.items() if i in speculating}
    return RoundPlan(chosen.shape, speculating, measure, off_reasons, others, retries)


def _best(
    offers: Sequence[_Offer], everyone: tuple[int, ...], costs: StepCosts, least_rate: float
) -> tuple[_Offer | None, tuple[int, ...]]:
    """The offer and the lanes with the most tokens per second; None: none is above that rate."""
    pairs = [(o, lanes) for o in offers for lanes in dict.fromkeys((everyone, o.paying))]
    rates = [offer.rate(lanes, costs) for offer, lanes in pairs]
    best_rate = max(rates, default=0.0)
    return pairs[rates.index(best_rate)] if best_rate > least_rate else (None, ())


def _nothing_pays(
    promised: Sequence[RoundShape],
    promises: Sequence[Promises],
    costs: StepCosts,
    worth_s: float,
) -> dict[int, str] | None:
    """Why no lane speculates, by index, where nothing is recorded and no promise gives a token for
    each `worth_s`; None if one does. Called for most tokens of a text that repeats nothing.
    """
    ratios = [
        (shape, round_s / worth_s)
        for shape in promised
        if (round_s := costs.seconds(len(promises), shape)) is not None
    ]
    reasons: dict[int, str] = {}
    for i, of_lane in enumerate(promises):
        closest = (0.0, 1.0, 1.0)
        for shape, break_even in ratios:
            promise = of_lane.get(shape.drafter)
            tau = 1.0 if promise is None else promise.tau(shape)
            if tau > break_even:
                return None
            closest = max(closest, (tau / break_even, tau, break_even))
        reasons |= {i: _reason(*closest[1:])} if ratios else {}
    return reasons


def pays(promise: Promise, num_lanes: int, kinds: RoundKinds, costs: StepCosts) -> bool:
    """Whether a round is worth its time for a lane with such a promise, one of `num_lanes`."""
    worth_s = kinds.worth_s(costs.seconds(num_lanes, None))
    rounds = ((s, costs.seconds(num_lanes, s)) for s in kinds.promised)
    return any(cost is not None and promise.tau(s) * worth_s > cost for s, cost in rounds)


def _is_due(shape: RoundShape, outlooks: Sequence[LaneOutlook], costs: StepCosts) -> bool:
    """Whether to measure a round of which records say what to expect: seldom if it is far from
    paying, as each then costs many tokens.
    """
    num_lanes = len(outlooks)
    if not costs.is_due(num_lanes, shape):
        return False
    round_s, plain_s = (costs.seconds(num_lanes, each) for each in (shape, None))
    if round_s is None or plain_s is None:
        return True
    is_near = any((2 * o.record.taus([shape])[0] - 1) * plain_s > round_s for o in outlooks)
    return is_near or costs.is_due(num_lanes, shape, HOPELESS_WAITS)


def _is_copy_due(shape: RoundShape, promises: Sequence[Promises], costs: StepCosts) -> bool:
    """Whether to measure a promised round: if a lane is likely to accept half of it."""
    found = (p.get(shape.drafter) for p in promises)
    is_likely = any(2 * promise.tau(shape) >= shape.block for promise in found if promise)
    return is_likely and costs.is_due(len(promises), shape)


@dataclass(frozen=True, slots=True)
class _Offer:
    """The expected tokens of a round of one shape for each lane, `taus`. `break_even`: tokens that
    pay for its time; `paying`: lanes that reach them, and those on trial. `others`: lanes for which
    another drafter than the shape's promises more.
    """

    shape: RoundShape
    taus: Sequence[float]
    break_even: float
    paying: tuple[int, ...]
    others: dict[int, str]

    @classmethod
    def of(
        cls,
        shape: RoundShape,
        recorded: Sequence[float] | None,
        outlooks: Sequence[LaneOutlook],
        promises: Sequence[Promises],
        break_even: float,
    ) -> _Offer:
        """`recorded`: the expected tokens by the lanes' records, None: they say nothing of this
        shape, and a lane without a promise gets one token.
        """
        taus = [1.0] * len(outlooks) if recorded is None else [*recorded]
        others = {}
        for i, of_lane in enumerate(promises):
            for name, promise in of_lane.items():
                if (tau := promise.tau(shape)) > taus[i]:
                    taus[i] = tau
                    if name != shape.drafter:
                        others[i] = name
        paying = [
            i
            for i, tau in enumerate(taus)
            if tau > break_even or (recorded is not None and outlooks[i].num_trials)
        ]
        return cls(shape, taus, break_even, tuple(paying), others)

    def rate(self, speculating: tuple[int, ...], costs: StepCosts) -> float:
        """Tokens per second of a round for some lanes, then a plain step for the others."""
        num_plain = len(self.taus) - len(speculating)
        round_s = costs.seconds(len(speculating), self.shape) if speculating else None
        plain_s = costs.seconds(num_plain, None) if num_plain else 0.0
        if round_s is None or plain_s is None:
            return 0.0
        return (num_plain + sum(self.taus[i] for i in speculating)) / (round_s + plain_s)


def _retry_after(lane: int, recorded: Sequence[_Offer]) -> int:
    """How many tokens a lane decodes plainly until speculation is retried."""
    lost = min((offer.break_even - offer.taus[lane] for offer in recorded), default=0.0)
    return min(max(RETRY_TOKENS, int(SHORT_TRIAL_ROUNDS * lost / RETRIED_SHARE)), MOST_RETRY_TOKENS)


def _why_off(lane: int, offers: Sequence[_Offer]) -> str:
    """Why a lane does not speculate, by the shape that comes closest to paying."""
    best = max(offers, key=lambda offer: offer.taus[lane] / offer.break_even)
    return _reason(best.taus[lane], best.break_even)


def _reason(tau: float, break_even: float) -> str:
    return f"{tau:.2f} tokens a round, {break_even:.2f} would pay for it"
