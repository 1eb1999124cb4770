"""Places are counted, and a refused client is told when to come back."""

from __future__ import annotations

import pytest

from luceasync.engine.admission import Admission
from luceasync.errors import QueueFull


def test_a_choice_beyond_lanes_and_queue_is_refused_until_one_has_finished():
    admission = Admission(num_lanes=2, max_queue=1)
    admission.check(3)
    admission.enter(3)
    with pytest.raises(QueueFull, match="1 requests are queued"):
        admission.check(1)
    admission.leave()
    admission.check(1)


def test_all_choices_of_a_request_need_a_place():
    with pytest.raises(QueueFull):
        Admission(num_lanes=2, max_queue=1).check(4)


class Clock:
    """Stands still."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def wait_s(admission: Admission, num_choices: int = 1) -> int:
    with pytest.raises(QueueFull) as caught:
        admission.check(num_choices)
    return caught.value.retry_after_s


def busy(clock: Clock, seconds: float) -> Admission:
    """Two lanes and a place to wait in; of its choices one ends every so many seconds."""
    admission = Admission(2, 1, clock)
    admission.enter(3)
    for _ in range(60):
        clock.now_s += seconds
        admission.leave()
        admission.enter(1)
    return admission


@pytest.mark.parametrize(("seconds", "expected"), [(0.01, 1), (1.0, 1), (7.0, 7), (500.0, 60)])
def test_a_refused_client_comes_back_when_one_more_choice_has_ended(seconds, expected):
    assert wait_s(busy(Clock(), seconds)) == expected


def test_clients_come_back_later_the_more_places_they_and_others_want():
    admission = busy(Clock(), 7.0)
    assert wait_s(admission, 2) == 14
    assert wait_s(admission) == 21  # two places are for the client before
    admission.leave()
    admission.enter(1)
    assert wait_s(admission) <= 7


def test_the_longer_no_choice_ends_the_later_clients_come_back():
    clock = Clock()
    admission = Admission(2, 1, clock)
    admission.enter(3)
    assert wait_s(admission) == 1
    clock.now_s += 20.0
    assert wait_s(admission) == 40  # the second refusal


def test_times_without_a_full_engine_are_not_measured():
    clock = Clock()
    admission = busy(clock, 2.0)
    for _ in range(3):
        admission.leave()
    clock.now_s += 3600.0
    admission.enter(3)
    assert wait_s(admission) <= 2


def test_a_clock_that_went_back_keeps_the_wait_within_bounds():
    clock = Clock()
    admission = busy(clock, 2.0)
    clock.now_s = -1e9
    admission.leave()
    admission.enter(1)
    assert 1 <= wait_s(admission) <= 60
