"""A wait ends at its deadline, and spins only where that has paid."""

import pytest

from luceasync.ipc.local import (
    BRIEF_SPIN_S,
    MAX_CREDIT,
    MAX_SPIN_S,
    PROBE_EVERY,
    SPARE_CORES,
    Deadline,
    WaitPolicy,
)


def test_short_waits_are_spun_for() -> None:
    patience = WaitPolicy.from_step_to_step(SPARE_CORES)
    for _ in range(3):
        patience.waited(MAX_SPIN_S / 2)
        assert patience.spin_s == MAX_SPIN_S


def test_long_waits_are_slept_for_but_for_a_probe_now_and_then() -> None:
    patience = WaitPolicy.from_step_to_step(SPARE_CORES)
    spins = []
    for _ in range(10 * PROBE_EVERY):
        patience.waited(2 * MAX_SPIN_S)
        spins.append(patience.spin_s)
    assert sum(each > 0 for each in spins[MAX_CREDIT - 1 :]) == 10


def test_one_that_comes_late_now_and_then_ends_no_spinning() -> None:
    patience = WaitPolicy.brief(2)
    for _ in range(10):
        for _ in range(MAX_CREDIT - 1):
            patience.waited(2 * BRIEF_SPIN_S)
            assert patience.spin_s == BRIEF_SPIN_S
        for _ in range(MAX_CREDIT - 1):
            patience.waited(BRIEF_SPIN_S / 2)
    for _ in range(MAX_CREDIT):
        patience.waited(2 * BRIEF_SPIN_S)
    assert patience.spin_s == 0


def test_a_probe_that_pays_brings_spinning_back() -> None:
    patience = WaitPolicy.from_step_to_step(SPARE_CORES)
    for _ in range(MAX_CREDIT):
        patience.waited(2 * MAX_SPIN_S)
    assert patience.spin_s == 0
    patience.waited(1e-6)
    assert patience.spin_s == MAX_SPIN_S


def test_few_cores_are_kept_for_short_answers_alone() -> None:
    assert WaitPolicy.from_step_to_step(SPARE_CORES - 1).spin_s == BRIEF_SPIN_S
    assert WaitPolicy.from_step_to_step(1).spin_s == WaitPolicy.brief(1).spin_s == 0


def test_where_brief_spins_fail_short_waits_asleep_do_not_bring_them_back() -> None:
    patience = WaitPolicy.brief(2)
    patience.waited(BRIEF_SPIN_S / 2)
    assert patience.spin_s == BRIEF_SPIN_S
    spins = []
    for _ in range(MAX_CREDIT):
        patience.waited(2 * BRIEF_SPIN_S)
    for _ in range(10 * PROBE_EVERY):
        spins.append(patience.spin_s)
        patience.waited(2 * BRIEF_SPIN_S if patience.spin_s else BRIEF_SPIN_S / 10)
    assert sum(each > 0 for each in spins) == 10


def test_a_deadline_passes() -> None:
    assert Deadline(0).is_past
    assert Deadline(0).left_ms() == 0
    soon = Deadline(100)
    assert not soon.is_past
    assert 99_000 < soon.left_ms() <= 100_000


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_what_is_no_moment_is_no_deadline(seconds: float) -> None:
    with pytest.raises(ValueError, match="a deadline in"):
        Deadline(seconds)
