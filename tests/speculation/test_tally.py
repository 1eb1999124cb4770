"""Counts of speculation, and what steps cost."""

from __future__ import annotations

import pytest

from luceasync.speculation.choice import NUM_MEASURED, STALE_STEPS, Shape, StepCosts
from luceasync.speculation.speculator import LaneTally, Totals

CHAIN = Shape(4)


def observed(*seconds: float, num_lanes: int = 1, shape: Shape | None = CHAIN) -> StepCosts:
    costs = StepCosts()
    for s in seconds:
        costs.observe(num_lanes, shape, s)
    return costs


def test_a_lane_counts_rounds_and_tokens():
    tally = LaneTally()
    tally.add(CHAIN, 3)
    tally.add(Shape(4, 8), 1)
    told = tally.told("why")
    assert (told.rounds, told.proposed, told.accepted, told.off_reason) == (2, 11, 4, "why")
    assert told.tau == 3.0


def test_slots_are_counted_by_depth():
    totals = Totals(3)
    totals.add(CHAIN, 2)
    totals.add(Shape(2), 1)
    told = totals.told()
    assert told.proposed_by_slot == (2, 1, 1)
    assert told.accepted_by_slot == (2, 1, 0)


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
    assert costs.seconds(2, Shape(2)) is None


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
