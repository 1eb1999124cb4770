"""The simulation chooses with the server's own code, and counts every token and its time."""

from __future__ import annotations

import pytest

from tests.acceptance.simulate_choice import (
    COSTS,
    DRAFTERS,
    Costs,
    Drafters,
    Text,
    fixed,
    time_of,
)

GPU, CPU = COSTS
ALONE, WITH_MTP, _ = DRAFTERS
NEW: list[Text] = [([1, 2, 3], [*range(4 + 200 * i, 164 + 200 * i)]) for i in range(4)]
COPIED: list[Text] = [([*range(300)], [*range(60, 260)])]


@pytest.mark.parametrize("costs", COSTS)
def test_a_text_that_repeats_nothing_takes_a_step_a_token(costs: Costs):
    num_tokens = sum(len(answer) - 1 for _, answer in NEW)
    assert time_of(NEW, ALONE, costs, fixed(ALONE)["plain"]) == num_tokens
    assert time_of(NEW, ALONE, costs, None) == num_tokens  # and it costs no round


def test_a_copy_takes_rounds_of_most_rows():
    num_rounds = -(-199 // 32)
    forced = time_of(COPIED, ALONE, GPU, fixed(ALONE)["lookup 32"])
    assert forced == pytest.approx(2 + num_rounds * GPU.verify(32), rel=0.1)
    assert time_of(COPIED, ALONE, GPU, None) < 1.3 * forced


def test_with_a_drafter_that_is_mostly_right_little_is_lost():
    times = [time_of(NEW, WITH_MTP, GPU, force) for force in fixed(WITH_MTP).values()]
    assert time_of(NEW, WITH_MTP, GPU, None) < 1.06 * min(times)


def test_a_drafter_that_does_not_pay_costs_less_than_one_part_in_a_hundred():
    """Behind a long context, say: 1.3 tokens a round, which takes 1.4 steps and more."""
    dear = Costs("dear rounds", lambda num_rows: 1.3 + 0.05 * num_rows, 0.04, 0.0)
    texts = [([1], [*range(2 + 2000 * i, 1000 + 2000 * i)]) for i in range(3)]
    num_tokens = sum(len(answer) - 1 for _, answer in texts)
    assert time_of(texts, Drafters("weak", (0.25, 0.2, 0.2)), dear, None) < 1.01 * num_tokens
