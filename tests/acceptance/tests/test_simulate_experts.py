"""The simulation of experts in host memory chooses with the server's own code."""

from __future__ import annotations

from luceasync.speculation.choice import RoundShape
from tests.acceptance.simulate_experts import HIT_S, MISS_S, MOST_LOST, STEP_S, Case, time_of

WEAK = (0.3, 0.25, 0.2)


def test_a_pass_costs_what_its_rows_miss() -> None:
    """Plain steps that find all experts in slots, and rounds that seldom find one."""
    resident = Case(1.0, 1.0, WEAK)
    step_s = time_of(resident, 1, None) / 399
    assert STEP_S + 320 * HIT_S < step_s < STEP_S + 321 * HIT_S + 2 * 320 * MISS_S / 399
    cold = Case(0.04, 0.0, WEAK)
    steps_s, rounds_s = (time_of(cold, 1, each) for each in (None, RoundShape(4, None, "mtp")))
    assert rounds_s > 2 * steps_s


def test_a_drafter_that_misses_make_too_dear_rests() -> None:
    case = Case(0.25, 0.3, WEAK)
    assert time_of(case, 4, "chosen") < (1 + MOST_LOST) * time_of(case, 4, None)
