"""When a process is started again, and when it is hung; and what users read."""

from __future__ import annotations

import pytest

from luceasync.ipc.supervised import Backoff, Course, Heartbeat

BACKOFF = Backoff()


def test_each_failure_after_the_first_doubles_the_wait_up_to_a_minute() -> None:
    delays = [BACKOFF.delay_s(count) for count in range(10)]
    assert delays == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert BACKOFF.delay_s(10_000) == 60


def test_a_process_is_started_once_and_not_before_its_time() -> None:
    course = Course()
    assert course.may_start(0.0)
    assert not course.started(0.0).may_start(5.0)
    once = course.started(0.0).failed(9.0, "gone", BACKOFF)
    assert once.may_start(9.0)
    twice = once.started(9.0).failed(10.0, "gone", BACKOFF)
    assert not twice.may_start(10.9)
    assert twice.may_start(11.0)


def test_one_that_ran_long_enough_begins_anew() -> None:
    course = Course()
    for now_s in (0.0, 10.0, 20.0):
        course = course.started(now_s).failed(now_s + 1, "gone", BACKOFF)
    assert course.num_failures == 3
    assert course.started(100.0).failed(109.9, "gone", BACKOFF).num_failures == 4
    assert course.started(100.0).failed(110.0, "gone", BACKOFF).num_failures == 1


@pytest.mark.parametrize(
    ("course", "now_s", "retry_after_s"),
    [
        (Course(1, 10.0, None, "gone"), 8.5, 22),  # 1.5 s until its start, 20 s for it
        (Course(1, 10.0, None, "gone"), 15.0, 20),
        (Course(1, 10.0, 10.0, "gone"), 15.0, 15),
        (Course(1, 10.0, 10.0, "gone"), 500.0, 1),
    ],
)
def test_who_must_wait_is_told_how_long(course: Course, now_s: float, retry_after_s: int) -> None:
    assert course.retry_after_s(now_s, start_s=20.0) == retry_after_s


def test_what_is_the_matter_is_said_in_words() -> None:
    course = Course()
    assert course.words("backend hip", 0.0) == "backend hip is down"
    assert course.started(0.0).words("backend hip", 0.0) == "backend hip is being started"
    course = course.started(0.0).failed(5.0, "ended by SIGKILL", BACKOFF)
    assert course.words("backend hip", 5.0) == (
        "backend hip failed and will be started again now: ended by SIGKILL"
    )
    course = course.started(6.0).failed(7.0, "no memory", BACKOFF)
    assert course.words("backend hip", 7.5) == (
        "backend hip failed (failure 2 in a row) and will be started again in 1 s: no memory"
    )
    assert course.started(60.0).words("backend hip", 60.0) == (
        "backend hip failed (failure 2 in a row) and is being started again: no memory"
    )


def test_silence_is_counted_while_the_one_who_asks_is_awake() -> None:
    heartbeat = Heartbeat(interval_s=1.0, deadline_s=5.0)
    silent_s = 0.0
    for passed_s in (1.0, 1.25, 3600.0, 1.0):  # a whole machine has slept for an hour
        silent_s = heartbeat.silent_s(silent_s, passed_s)
        assert not heartbeat.is_hung(silent_s)
    assert silent_s == 4.0
    assert heartbeat.is_hung(heartbeat.silent_s(silent_s, 1.0))
