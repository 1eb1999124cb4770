"""How far to speculate depends on accepted rows and measured costs alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from luceasync.speculation.choice import (
    LEAST_GAIN,
    LENGTHS,
    MOST_RETRY_TOKENS,
    NUM_MEASURED,
    NUM_SAMPLES,
    REFILL_TOKENS,
    RETRY_TOKENS,
    SHORT_TRIAL_ROUNDS,
    STALE_STEPS,
    TRIAL_ROUNDS,
    AcceptanceRecord,
    DepthRates,
    LaneOutlook,
    Promise,
    RoundKinds,
    RoundPlan,
    RoundShape,
    StepCosts,
    pays,
    plan_step,
    shapes_for,
    without_context,
)
from luceasync.speculation.lookup import lookup_shapes
from luceasync.speculation.speculator import LaneTally, SpeculationTotals

SHAPES = shapes_for(16, None)


class Table:
    """Costs by shape, in plain steps of one lane; `per_lane` is what each further lane adds."""

    def __init__(self, rounds: dict[RoundShape, float], per_lane: float = 0.0, due=()) -> None:
        self.steps = {**rounds, None: 1.0}
        self.per_lane = per_lane
        self.due = set(due)

    def seconds(self, num_lanes, shape):
        cost = self.steps.get(shape)
        num_rows = 1 if shape is None else shape.num_rows
        return None if cost is None else cost + self.per_lane * (num_lanes - 1) * num_rows

    def is_due(self, num_lanes, shape, num_waits=1):
        return shape in self.due


IDLE = Table({RoundShape(16): 1.4, RoundShape(8): 1.3, RoundShape(4): 1.25, RoundShape(2): 1.2})


def accepting(*num_accepted: int) -> LaneOutlook:
    """A lane whose rounds had so many rows accepted, in turn."""
    outlook = LaneOutlook()
    for _ in range(30):
        for n in num_accepted:
            outlook = outlook.after_round(RoundShape(16), n)
    return outlook


def plan(outlooks, costs, shapes=SHAPES, measure=False):
    return plan_step(outlooks, RoundKinds(tuple(shapes)), costs, measure=measure)


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "budget", "rows"),
    [
        (16, None, [16, 8, 4, 2]),
        (10, None, [10, 5, 4, 2]),
        (7, None, [7, 4, 2]),
        (3, None, [3, 2]),
        (2, None, [2]),
        (8, 22, [23, 8, 4, 2]),
    ],
)
def test_rounds_have_few_shapes(block, budget, rows):
    assert [shape.num_rows for shape in shapes_for(block, budget)] == rows


# --- what rounds have shown -----------------------------------------------------------------------


def reach_of(*rounds: tuple[int, int]) -> DepthRates:
    reach = DepthRates()
    for num_slots, num_accepted in rounds:
        reach = reach.after(num_slots, num_accepted)
    return reach


@pytest.mark.parametrize("num_accepted", [0, 3, 7])
def test_tau_is_what_rounds_gave(num_accepted):
    reach = reach_of(*[(7, num_accepted)] * 20)
    assert reach.taus(7)[7] == pytest.approx(1 + num_accepted)


def test_tau_of_a_shorter_block_follows_from_a_longer_one():
    reach = reach_of(*[(15, 6), (15, 0)] * 40)
    assert reach.taus(3)[3] == pytest.approx(1 + 3 / 2, rel=0.05)


def test_shorter_rounds_leave_what_is_known_of_deeper_slots():
    reach = reach_of(*[(7, 7)] * 20, *[(2, 2)] * 20)
    assert reach.taus(7)[7] == pytest.approx(8)


def test_a_depth_that_was_never_tried_is_hoped_to_fall_off_as_those_before():
    reach = reach_of(*[(2, 2), (2, 0)] * 60)
    share = 0.5
    assert reach.taus(4)[4] == pytest.approx(1 + 2 * share + share**1.5 + share**2, rel=0.1)


def test_a_first_round_that_accepts_nothing_does_not_hide_deeper_ones_for_ever():
    """Once shorter rounds are accepted: else longer ones would never be tried again."""
    reach = reach_of((3, 0), *[(1, 1)] * 12)
    assert reach.taus(3)[3] > 2.5
    assert reach_of(*[(3, 1)] * 12, (1, 1)).taus(3)[3] < 2.2  # those that were refused often are


def test_old_rounds_weigh_less():
    reach = reach_of(*[(7, 7)] * 200, *[(7, 0)] * 60)
    assert reach.taus(7)[7] < 1.7


def test_trees_and_chains_are_known_apart():
    record = AcceptanceRecord()
    for _ in range(10):
        record = record.after(RoundShape(8), 2).after(RoundShape(8, 22), 5)
    assert record.taus([RoundShape(8)])[0] == pytest.approx(3)
    assert record.taus([RoundShape(8, 22)])[0] == pytest.approx(6)


# --- the block ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_accepted", "per_lane", "num_lanes", "block"),
    [
        ([15], 0.0, 1, 16),
        ([7], 0.0, 1, 8),  # rows that are never accepted are not worth their time
        ([3], 0.0, 1, 4),
        ([1], 0.0, 1, 2),
        ([7, 0], 0.0, 4, 8),
        ([7, 0], 0.02, 4, 8),
        ([7, 1], 0.3, 8, 2),  # every row costs: few are verified
        ([15], 0.3, 8, 16),  # but where all are accepted
    ],
)
def test_the_block_follows_acceptance_and_load(num_accepted, per_lane, num_lanes, block):
    costs = Table(IDLE.steps, per_lane)
    found = plan([accepting(*num_accepted)] * num_lanes, costs).shape
    assert found is not None and found.block == block


def test_a_tree_is_taken_where_it_pays_and_chains_under_load():
    shapes = shapes_for(8, 22)
    outlook = LaneOutlook(num_trials=0)
    for _ in range(20):
        outlook = outlook.after_round(RoundShape(8, 22), 5).after_round(RoundShape(8), 3)
    rounds = {RoundShape(8, 22): 1.4, RoundShape(8): 1.3, RoundShape(4): 1.2, RoundShape(2): 1.1}
    assert plan([outlook], Table(rounds), shapes).shape == RoundShape(8, 22)
    loaded = plan([outlook] * 8, Table(rounds, per_lane=0.05), shapes).shape
    assert loaded is not None and loaded.budget is None


# --- off, and on again ----------------------------------------------------------------------------


def test_without_acceptance_lanes_decode_plainly_and_say_why():
    found = plan([accepting(0)], IDLE)
    assert (found.shape, found.speculating) == (None, ())
    assert found.off_reasons == {0: "1.00 tokens a round, 1.26 would pay for it"}


def test_a_lane_that_is_new_speculates_whatever_others_showed():
    outlook = LaneOutlook(accepting(0).record.as_prior())
    for _ in range(TRIAL_ROUNDS):
        assert plan([outlook], IDLE).speculating == (0,)
        outlook = outlook.after_round(RoundShape(2), 0)
    assert plan([outlook], IDLE).speculating == ()


def test_what_many_rounds_showed_is_tried_for_two_more_on_a_new_text():
    """A drafter that is refused everywhere costs each short answer little."""
    common = accepting(0).record
    for outlook in (LaneOutlook.of_new_text(common), resumed(accepting(0))):
        for _ in range(2):
            assert plan([outlook], IDLE).speculating == (0,)
            outlook = outlook.after_round(RoundShape(2), 0)
        assert plan([outlook], IDLE).speculating == ()
    assert LaneOutlook.of_new_text(AcceptanceRecord()).num_trials == TRIAL_ROUNDS


def resumed(outlook: LaneOutlook) -> LaneOutlook:
    """After as many plain tokens as it takes."""
    for _ in range(RETRY_TOKENS):
        outlook = outlook.after_plain("1.00 tokens a round")
    return outlook


def test_a_lane_off_is_left_out_where_every_row_costs():
    costs = Table(
        {RoundShape(16): 5.0, RoundShape(8): 3.0, RoundShape(4): 2.0, RoundShape(2): 1.5},
        per_lane=0.3,
    )
    found = plan([accepting(15), accepting(0), accepting(15)], costs)
    assert found.speculating == (0, 2)
    assert list(found.off_reasons) == [1]


def test_a_lane_off_rides_along_where_a_step_of_its_own_costs_more():
    found = plan([accepting(15), accepting(0)], IDLE)
    assert found.speculating == (0, 1)
    assert found.off_reasons == {}


def test_a_lane_that_was_given_up_is_tried_again():
    outlook = accepting(0)
    for _ in range(RETRY_TOKENS - 1):
        outlook = outlook.after_plain("why")
        assert outlook.off_reason == "why" and plan([outlook], IDLE).speculating == ()
    outlook = outlook.after_plain("why")
    assert outlook.off_reason is None and plan([outlook], IDLE).speculating == (0,)


@pytest.mark.parametrize(
    ("break_even", "num_tokens"), [(1.2, RETRY_TOKENS), (2.0, 550), (9.0, MOST_RETRY_TOKENS)]
)
def test_the_dearer_rounds_are_the_longer_it_waits(break_even, num_tokens):
    """Trying again may cost a 250th of a text."""
    costs = Table({RoundShape(2): break_even})
    outlook = LaneOutlook(accepting(0).record, 0)
    found = plan_step([outlook], RoundKinds((RoundShape(2),)), costs, measure=False)
    assert found.shape is None and found.retries == {0: pytest.approx(num_tokens, abs=1)}
    for _ in range(found.retries[0]):
        assert outlook.num_trials == 0
        outlook = outlook.after_plain(found.off_reasons[0], found.retries[0])
    assert outlook.num_trials > 0


def test_a_lane_without_features_waits_until_it_has_some():
    outlook = without_context(15, "restored without features")
    for _ in range(REFILL_TOKENS):
        found = plan([outlook], IDLE)
        assert found.speculating == () and outlook.off_reason == "restored without features"
        outlook = outlook.after_plain(found.off_reasons[0])
    assert plan([outlook], IDLE).speculating == (0,)


# --- costs that are not known ---------------------------------------------------------------------


def test_what_is_due_is_measured_first():
    costs = Table(IDLE.steps, due=[RoundShape(4), None])
    assert plan([accepting(15)], costs, measure=True).shape == RoundShape(4)
    costs.due = {None}
    found = plan([accepting(15)], costs, measure=True)
    assert (found.shape, found.speculating, found.off_reasons) == (None, (), {})


def test_nothing_is_measured_beside_other_work():
    found = plan([accepting(15)], Table(IDLE.steps, due=[RoundShape(4)]), measure=False)
    assert found.shape == RoundShape(16) and not found.is_measured


def test_before_anything_is_known_the_whole_block_is_tried():
    assert plan([LaneOutlook()] * 2, Table({})).shape == RoundShape(16)


CHAIN = RoundShape(4)


def observed(*seconds: float, num_lanes: int = 1, shape: RoundShape | None = CHAIN) -> StepCosts:
    costs = StepCosts()
    for s in seconds:
        costs.observe(num_lanes, shape, s)
    return costs


def test_a_lane_counts_rounds_and_tokens():
    tally = LaneTally()
    tally.add(3, 3)
    tally.add(8, 1)
    summary = tally.summary("why")
    assert (summary.rounds, summary.proposed, summary.accepted, summary.off_reason) == (
        2,
        11,
        4,
        "why",
    )
    assert summary.tau == 3.0


def test_slots_are_counted_by_depth():
    totals = SpeculationTotals(3)
    totals.add("dflash", 3, 3, 2)
    totals.add("dflash", 1, 1, 1)
    summary = totals.summary()
    assert summary.proposed_by_slot == (2, 1, 1)
    assert summary.accepted_by_slot == (2, 1, 0)


def test_the_first_time_does_not_count():
    assert observed(9.0).seconds(1, CHAIN) is None
    assert observed(9.0, 1.0).seconds(1, CHAIN) == 1.0


@pytest.mark.parametrize(
    "seconds", [(50.0, 1.0), (1.0, 50.0), (50.0, 50.0, 1.0), (50.0, 1.0, 1.0, 2.0, 2.0, 50.0, 2.0)]
)
def test_steps_that_were_held_up_do_not_count(seconds):
    assert observed(1.0, *seconds).seconds(1, CHAIN) == 1.0


def test_a_cost_that_grows_is_followed():
    assert observed(*[1.0] * 9, *[2.0] * 7).seconds(1, CHAIN) == 2.0


def test_the_nearest_number_of_lanes_stands_in_and_no_other_shape():
    costs = observed(1.0, 1.0, num_lanes=2)
    costs.observe(4, CHAIN, 3.0)
    costs.observe(4, CHAIN, 3.0)
    assert [costs.seconds(n, CHAIN) for n in (1, 2, 3, 8)] == [1.0, 1.0, 3.0, 3.0]
    assert costs.seconds(2, RoundShape(2)) is None


def test_costs_of_long_contexts_are_their_own_and_before_that_follow_the_plain_step():
    costs = observed(1.0, 1.0, shape=None)
    for seconds in (3.0, 3.0):
        costs.observe(1, CHAIN, seconds)
    far = costs.at(LENGTHS[1])
    assert far.seconds(1, CHAIN) == 3.0 and far is costs.at(LENGTHS[1] + 5) is not costs
    assert costs.at(LENGTHS[0] - 1) is costs
    far.observe(1, None, 9.0)
    far.observe(1, None, 2.0)
    assert (far.seconds(1, None), far.seconds(1, CHAIN)) == (2.0, 6.0)
    far.observe(1, CHAIN, 9.0)
    far.observe(1, CHAIN, 8.0)
    assert far.seconds(1, CHAIN) == 8.0
    assert (costs.seconds(1, None), costs.seconds(1, CHAIN)) == (1.0, 3.0)


def test_a_cost_is_due_until_it_was_measured_and_when_it_is_old():
    costs = StepCosts()
    for _ in range(NUM_MEASURED):
        assert costs.is_due(1, CHAIN)
        costs.observe(1, CHAIN, 1.0)
    waits = []
    for _ in range(5):
        assert not costs.is_due(1, CHAIN)
        waits.append(0)
        while not costs.is_due(1, CHAIN):
            costs.observe(1, None, 1.0)
            waits[-1] += 1
        costs.observe(1, CHAIN, 1.0)
    assert waits == [17, 65, 257, STALE_STEPS + 1, STALE_STEPS + 1]


def test_where_steps_take_less_and_less_rounds_are_measured_again():
    """While slots fill with experts: else rounds would cost for long what the first ones did."""
    costs = StepCosts()
    for _ in range(NUM_SAMPLES + 1):
        costs.observe(1, CHAIN, 10.0)
        costs.observe(1, None, 5.0)
    assert not costs.is_due(1, CHAIN)
    for _ in range(NUM_SAMPLES):
        costs.observe(1, None, 2.0)
    assert costs.is_due(1, CHAIN)
    for _ in range(NUM_MEASURED - 1):
        assert costs.is_due(1, CHAIN)
        costs.observe(1, CHAIN, 3.0)
    assert costs.seconds(1, CHAIN) == 3.0 and not costs.is_due(1, CHAIN)


def test_rounds_that_are_far_from_paying_are_measured_seldom():
    """A round of 16 rows that takes 11 steps costs more than all else that measuring takes."""
    seconds = {None: 1.0, RoundShape(16): 11.0, RoundShape(2): 1.9}
    costs, outlook, counts = StepCosts(), replace(accepting(1), num_trials=0), Counter()
    for step in range(9 * STALE_STEPS):
        shape = plan([outlook], costs, (RoundShape(16), RoundShape(2)), measure=True).shape
        costs.observe(1, shape, seconds[shape])
        counts[shape] += step > STALE_STEPS
    assert counts[RoundShape(16)] <= 1 < 6 <= counts[RoundShape(2)]


# --- drafters that promise ------------------------------------------------------------------------

LOOKUP = lookup_shapes((16, 8, 4))
COPIES = Table(dict(zip(LOOKUP, (2.0, 1.6, 1.3), strict=True)))
OFF = LaneOutlook(num_trials=0)


def promising(*lanes: float | None, costs=COPIES, shapes=(), measure=False) -> RoundPlan:
    """The plan for lanes that are promised that share of all tokens; None: nothing."""
    promises = [
        {} if share is None else {"lookup": Promise([1.0 + share * n for n in range(32)])}
        for share in lanes
    ]
    outlooks = [accepting(3) if shapes else LaneOutlook()] * len(lanes)
    kinds = RoundKinds(tuple(shapes), LOOKUP)
    return plan_step(outlooks, kinds, costs, measure=measure, promises=promises)


@pytest.mark.parametrize(
    ("share", "block"), [(1.0, 16), (0.3, 16), (0.08, 16), (0.05, None), (0.0, None), (None, None)]
)
def test_a_round_of_copies_is_run_where_it_pays(share, block):
    found = promising(share)
    assert (found.shape and found.shape.block) == block
    assert found.speculating == (() if block is None else (0,))


def test_rows_that_a_drafter_does_not_have_are_not_paid_for():
    promises = [{"lookup": Promise([1.0, 2.0, 3.0, 4.0])}]
    found = plan_step([OFF], RoundKinds((), LOOKUP), COPIES, measure=False, promises=promises)
    assert found.shape == LOOKUP[-1]


def test_why_a_promise_does_not_pay_is_told():
    assert promising(0.05).off_reasons == {0: "1.15 tokens a round, 1.37 would pay for it"}
    assert promising(None).off_reasons == {}


def test_a_lane_without_a_promise_rides_along_or_takes_its_own_step():
    assert promising(1.0, None).speculating == (0, 1)
    dear = Table(COPIES.steps, per_lane=0.5)
    found = promising(1.0, None, costs=dear)
    assert (found.speculating, [*found.off_reasons]) == ((0,), [1])


def test_copies_that_do_not_pay_are_no_trial_of_another_drafter():
    """Else they would be run for as long as the text lasts: a trial counts its own rounds."""
    costs = Table({RoundShape(2): 2.5, **COPIES.steps})
    kinds, promises = RoundKinds((RoundShape(2),), LOOKUP), [{"lookup": Promise([1.0, 1.2])}]
    new = LaneOutlook(accepting(0).record, SHORT_TRIAL_ROUNDS)
    found = plan_step([new], kinds, costs, measure=False, promises=promises)
    assert (found.shape, found.speculating, found.others) == (RoundShape(2), (0,), {})
    copied = plan_step(
        [new], kinds, costs, measure=False, promises=[{"lookup": Promise([1.0, 2.0])}]
    )
    assert copied.shape == LOOKUP[-1]  # which pays: the trial waits


def test_what_gains_too_little_to_be_sure_of_is_not_run():
    costs = Table({LOOKUP[-1]: 2.0})
    for share, ahead_s, speculates in (
        (LEAST_GAIN - 0.01, 0.0, False),
        (LEAST_GAIN + 0.01, 0.0, True),
        # a plain step takes 1 s, and that much less where a device begins it ahead
        (LEAST_GAIN + 0.44, 0.45, False),
        (LEAST_GAIN + 0.46, 0.45, True),
    ):
        kinds = RoundKinds((), LOOKUP, ahead_s)
        promises = [{"lookup": Promise([1.0, 2.0 * share])}]
        found = plan_step([OFF], kinds, costs, measure=False, promises=promises)
        assert bool(found.speculating) == speculates
        assert pays(promises[0]["lookup"], 1, kinds, costs) == speculates


def test_a_lane_takes_the_rows_of_the_drafter_that_gives_more():
    costs = Table({**IDLE.steps, **COPIES.steps, RoundShape(16): 1.9})
    shapes = (RoundShape(16), RoundShape(8))
    found = promising(1.0, None, costs=costs, shapes=shapes)
    assert (found.shape, found.speculating) == (RoundShape(16), (0, 1))
    assert found.others == {0: "lookup"}
    alone = promising(1.0, costs=Table({**costs.steps, LOOKUP[0]: 1.2}), shapes=shapes)
    assert (alone.shape, alone.others) == (LOOKUP[0], {})


def test_the_cost_of_copies_is_measured_where_half_of_them_are_likely_to_stand():
    costs = Table(COPIES.steps, due=LOOKUP)
    assert promising(0.05, costs=costs, measure=True).shape is None
    assert promising(0.9, costs=costs, measure=True).shape == LOOKUP[0]
    assert promising(None, costs=costs, measure=True).shape is None


def test_nothing_is_known_to_pay_before_it_was_measured():
    assert promising(1.0, costs=Table({})).shape is None
    kinds = RoundKinds((), LOOKUP)
    likely = Promise([1.0 + n for n in range(32)])
    assert pays(likely, 1, kinds, COPIES) and not pays(likely, 1, kinds, Table({}))
    assert not pays(Promise([1.0] * 32), 1, kinds, COPIES)
