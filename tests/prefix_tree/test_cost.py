"""Whether a prefix is restored or run again follows from measured rates."""

import pytest

from luceasync.prefix_tree.cost import (
    Arrival,
    Decision,
    Rates,
    is_given_up,
    patience_s,
    prefill_work,
    restore_or_prefill,
)

MIB = 1 << 20
RATES = Rates(disk_bytes_per_s=1e9, bus_bytes_per_s=1e10, prefill_tokens_per_s=1000.0)


def decide(num_tokens: int, memory_bytes: int, disk_bytes: int, rates: Rates = RATES):
    return restore_or_prefill(
        num_tokens, memory_bytes=memory_bytes, disk_bytes=disk_bytes, rates=rates
    )


def test_files_are_read_and_all_bytes_cross_the_bus():
    decision = decide(1000, 10**9, 10**9)
    assert decision.restore_s == pytest.approx(1.0 + 0.2)
    assert decision.prefill_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("num_tokens", "memory_bytes", "disk_bytes", "restore", "reason"),
    [
        (1000, 10**9, 0, True, "restore_is_faster"),
        (1000, 10**11, 10**9, False, "prefill_is_faster"),  # the bus alone takes longer
        (1000, 0, 10**9, True, "trial"),  # the page cache may hold the files
        (5, 0, 10**7, False, "prefill_is_faster"),
        (5000, 0, 10**9, True, "restore_is_faster"),
    ],
)
def test_the_faster_way_is_taken(num_tokens, memory_bytes, disk_bytes, restore, reason):
    decision = decide(num_tokens, memory_bytes, disk_bytes)
    assert (decision.restore, decision.reason) == (restore, reason)


def test_what_was_never_measured_is_restored():
    assert decide(1, 10**12, 10**12, Rates()).reason == "not_measured"
    assert decide(1, 10**12, 10**12, Rates()).restore


def test_memory_needs_no_disk_to_have_been_measured():
    rates = Rates(bus_bytes_per_s=1e10, prefill_tokens_per_s=1000.0)
    assert decide(1000, 10**6, 0, rates).reason == "restore_is_faster"
    assert decide(1000, 0, 10**6, rates).reason == "not_measured"


def test_files_are_compared_by_the_disk_alone_until_the_bus_is_measured():
    rates = Rates(disk_bytes_per_s=1e9, prefill_tokens_per_s=1000.0)
    assert decide(5000, 0, 10**9, rates) == Decision(True, "restore_is_faster", 1.0, 5.0)
    assert decide(900, 0, 10**9, rates).reason == "trial"
    assert decide(5, 0, 10**7, rates).reason == "prefill_is_faster"
    assert decide(5000, 10**9, 0, rates).reason == "not_measured"


def test_the_first_observation_is_the_rate():
    assert Rates().observed("disk_bytes_per_s", 30 * MIB, 2.0).disk_bytes_per_s == 15.0 * MIB


def test_the_average_is_of_seconds_per_unit_and_moves_towards_the_newest():
    once = Rates(prefill_tokens_per_s=100.0).observed("prefill_tokens_per_s", 100, 5.0)
    assert 1 / once.prefill_tokens_per_s == pytest.approx(0.75 * 0.01 + 0.25 * 0.05)
    for _ in range(60):
        once = once.observed("prefill_tokens_per_s", 100, 5.0)
    assert once.prefill_tokens_per_s == pytest.approx(20.0)


@pytest.mark.parametrize(("amount", "elapsed_s"), [(0, 1.0), (63, 1.0), (100, 0.0), (100, -1.0)])
def test_empty_observations_are_ignored(amount, elapsed_s):
    assert RATES.observed("prefill_tokens_per_s", amount, elapsed_s) is RATES


def test_a_small_late_file_does_not_count_as_a_slow_disk():
    assert RATES.observed("disk_bytes_per_s", MIB, 10.0) is RATES


def test_a_disk_that_was_slow_once_is_tried_again():
    rates = RATES.observed("disk_bytes_per_s", 10 * MIB, 60.0)
    for _ in range(200):
        if decide(50, 0, 10**7, rates).restore:
            return
        rates = rates.after_refusal()
    raise AssertionError(rates)


TICK_S = 0.01  # between two looks at a read


def first_token_s(prefill_s: float, read_s: float, seek_s: float = 0.0) -> float:
    """When a prompt goes on whose files come at one rate, after a seek, if it may give up."""
    num_bytes, rates = 10**9, Rates(prefill_tokens_per_s=1000.0 / prefill_s)
    now_s, first = 0.0, None
    while (now_s := now_s + TICK_S) < seek_s + read_s:
        come = Arrival(max(0, round(num_bytes * (now_s - seek_s) / read_s)), now_s)
        first = first or (come if come.num_bytes else None)
        if is_given_up(1000, num_bytes=num_bytes, first=first, come=come, rates=rates):
            return now_s + prefill_s
    return seek_s + read_s


@pytest.mark.parametrize("prefill_s", [0.2, 0.4, 1.44, 20.0])
@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.9, 1.0, 1.04, 1.1, 2.0, 100.0])
def test_a_first_restore_is_hardly_later_than_the_better_way(prefill_s: float, ratio: float):
    found_s = first_token_s(prefill_s, ratio * prefill_s)
    assert found_s <= 1.1 * min(1.0, ratio) * prefill_s + 1e-9
    assert found_s == ratio * prefill_s or ratio > 1.0


def test_a_read_that_does_not_begin_is_given_up_soon():
    assert first_token_s(1.0, 0.1, seek_s=30.0) <= 1.1


@pytest.mark.parametrize("seek", [0.02, 0.04, 0.055, 0.075])
def test_a_fast_read_that_begins_late_is_waited_for(seek: float):
    assert first_token_s(1.44, 0.7, seek_s=seek * 1.44) == seek * 1.44 + 0.7


@pytest.mark.parametrize("seek", [0.02, 0.04, 0.055])
def test_a_slow_read_that_begins_late_is_given_up(seek: float):
    assert first_token_s(1.44, 4.0, seek_s=seek * 1.44) <= 1.1 * 1.44


def given_up(num_tokens: int, num_bytes: int, come: Arrival, rates: Rates) -> bool:
    return is_given_up(num_tokens, num_bytes=num_bytes, first=None, come=come, rates=rates)


def test_a_short_prompt_waits_for_the_disk():
    assert not given_up(150, 10**9, Arrival(0, 9.0), Rates(prefill_tokens_per_s=1000.0))


def test_small_files_are_waited_for():
    rates = Rates(prefill_tokens_per_s=1000.0)
    assert not given_up(9000, 15 * MIB, Arrival(0, 9.0), rates)
    assert given_up(9000, 16 * MIB, Arrival(0, 9.0), rates)


def test_no_read_is_given_up_for_a_prefill_of_unknown_speed():
    assert not given_up(1000, 10**9, Arrival(0, 99.0), Rates())


def test_what_is_left_must_cross_the_bus_too():
    rates, come = Rates(bus_bytes_per_s=1e9, prefill_tokens_per_s=1000.0), Arrival(10**8, 0.1)
    assert given_up(1000, 10**9, come, rates)  # 0.9 s are left to read, 1.0 to cross
    assert not given_up(2000, 10**9, come, rates)


def test_tokens_cost_more_the_more_they_see():
    assert prefill_work(0, 2048, None) == 2048
    assert prefill_work(0, 2000, 1000.0) == 4000
    halves = prefill_work(0, 1000, 500.0), prefill_work(1000, 2000, 500.0)
    assert sum(halves) == prefill_work(0, 2000, 500.0) and halves[1] == 2 * halves[0]


def test_a_disk_is_not_waited_for_much_longer_than_running_the_tokens_takes():
    measured = Rates(prefill_tokens_per_s=1000.0)
    assert patience_s(4000, measured) == 8.0
    assert patience_s(40, measured) == 2.0  # a disk may have to wake up
    assert patience_s(4000, Rates()) == 40.0
