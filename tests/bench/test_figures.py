"""What many samples say."""

import pytest

from luceasync.bench.figures import medians, paired_ratio, percentile, spread


def test_a_ratio_is_taken_pair_by_pair_so_that_a_slow_round_does_not_count() -> None:
    ours, base = [2.0, 20.0, 2.0], [1.0, 10.0, 1.0]  # the machine was busy in the second round
    assert paired_ratio(ours, base) == 2.0
    assert paired_ratio([1.0, 30.0, 3.0], [1.0, 10.0, 1.5]) == 2.0  # not 3.0 / 1.5 of the medians


def test_ratios_need_as_many_rounds_of_both() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_medians_are_those_of_each_variant() -> None:
    assert medians({"a": [3.0, 1.0, 2.0], "b": [4.0, 6.0]}) == {"a": 2.0, "b": 5.0}


@pytest.mark.parametrize(("percent", "sample"), [(0, 1.0), (50, 3.0), (99, 4.0), (100, 5.0)])
def test_a_percentile_is_a_sample(percent: float, sample: float) -> None:
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], percent) == sample


def test_spread_is_the_middle_half_by_the_median() -> None:
    assert spread([10.0, 11.0, 12.0, 13.0, 14.0]) == pytest.approx(2 / 12)
    assert spread([7.0]) == 0.0
