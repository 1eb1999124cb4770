"""Places are counted, and who finds none is told when to come back."""

from __future__ import annotations

import pytest

from luceasync.engine.admission import Admission, retry_after_s
from luceasync.errors import QueueFull
from luceasync.request import Timings


def ended(seconds: float) -> Timings:
    return Timings(9.0, seconds / 2, seconds / 2, num_prefilled=1, num_decoded=1)


def test_a_choice_beyond_lanes_and_queue_is_refused_until_one_has_finished():
    admission = Admission(num_lanes=2, max_queue=1)
    admission.check(3)
    admission.enter(3)
    with pytest.raises(QueueFull, match="1 requests are queued"):
        admission.check(1)
    admission.leave(ended(1.0))
    admission.check(1)


def test_all_choices_of_a_request_need_a_place():
    with pytest.raises(QueueFull):
        Admission(num_lanes=2, max_queue=1).check(4)


def test_the_longer_choices_take_the_later_one_is_to_come_back():
    admission = Admission(num_lanes=1, max_queue=0)
    admission.enter(101)
    for _ in range(100):
        admission.leave(ended(20.0))
    with pytest.raises(QueueFull) as caught:
        admission.check(1)
    assert caught.value.retry_after_s == 20


@pytest.mark.parametrize(
    ("num_lanes", "mean_s", "expected"), [(4, 0.0, 1), (4, 20.0, 5), (1, 20.0, 20), (1, 1e9, 60)]
)
def test_retry_after_is_the_time_to_a_free_lane_within_bounds(num_lanes, mean_s, expected):
    assert retry_after_s(num_lanes, mean_s) == expected
