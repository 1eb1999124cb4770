"""A process that is restarted: when, what its status says, its deadlines, and its total counts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.errors import ChannelClosed, PeerMismatch, Unavailable
from luceasync.ipc.channel import Statement
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.ipc.supervised import (
    FIRST_S,
    LEAST_S,
    NUM_FIRST,
    Backoff,
    CallDeadlines,
    CallKind,
    CallTimes,
    Heartbeat,
    StartHistory,
    SupervisedProcess,
    deadline_s,
)
from tests.ipc.echo_child import Ask, Tell

CHILD, ROOT = Path(__file__).with_name("echo_child.py"), Path(__file__).parents[2]
DEADLINE_S = 30.0


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    before = os.listdir("/proc/self/fd")
    program = Program(
        Path(sys.executable), "child", (1 << 16, 1 << 16), environment={"PYTHONPATH": str(ROOT)}
    )
    made = LocalLauncher(program, lambda line: None)
    yield made
    made.close()
    assert os.listdir("/proc/self/fd") == before


def supervised(
    launcher: LocalLauncher, stopping: threading.Event | None = None
) -> SupervisedProcess:
    backoff = Backoff(second_s=0.2, longest_s=600.0)
    return SupervisedProcess(
        launcher, "group 7", ("hip:0",), stopping or threading.Event(), backoff
    )


def start(process: SupervisedProcess, mode: str = "echo"):
    return process.start([str(CHILD), mode], (Tell,), Statement(), DEADLINE_S)


@pytest.mark.slow
def test_it_is_there_from_its_arrival_to_its_end(launcher: LocalLauncher):
    process = supervised(launcher)
    assert process.status.detail == "group 7 is down"
    life = start(process)
    assert process.status.detail == "group 7 is being started"
    process.arrived()
    assert (process.status.detail, process.status.num_starts) == ("", 1)
    os.kill(life.started.child.pid, signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        life.started.channel.receive(DEADLINE_S)
    words = "group 7 failed and will be restarted now: "
    assert process.status.detail == words + "it has ended, or hangs"
    process.failed("the reason")
    process.failed("said twice")
    assert process.status.detail == words + "the reason"


@pytest.mark.slow
def test_all_its_lives_count(launcher: LocalLauncher):
    process = supervised(launcher)
    sent = []
    for _ in range(2):
        life = start(process)
        process.arrived()
        life.started.channel.call(Ask("x" * 1000), Tell, deadline_s=DEADLINE_S)
        life.deadlines.took(CallKind("ask"), 0.5)
        sent.append(process.status.sent_bytes_total)
    process.stop()
    status = process.status
    assert (status.num_starts, status.calls_total, status.call_s_total) == (2, 2, 1.0)
    assert sent[1] >= sent[0] + 1000
    assert status.sent_bytes_total == sent[1]
    assert (status.resident_bytes, status.heartbeat_age_s) == (0, None)


@pytest.mark.slow
def test_a_start_that_comes_to_nothing_leaves_nothing(launcher: LocalLauncher):
    process = supervised(launcher)
    with pytest.raises(PeerMismatch, match=r"luceasync 0\.0 here"):
        start(process, "version")
    assert "luceasync 0.0 here" in process.status.detail
    assert process.status.resident_bytes == 0


@pytest.mark.slow
def test_a_second_failure_delays_the_restart_unless_it_is_stopping(launcher: LocalLauncher):
    stopping = threading.Event()
    process = supervised(launcher, stopping)
    for _ in range(2):
        process.wait()
        start(process)
        process.failed("gone")
    assert "(failure 2 in a row)" in process.status.detail
    stopping.set()
    with pytest.raises(Unavailable, match="shutting down"):
        process.wait()


BACKOFF = Backoff()


def test_each_failure_after_the_first_doubles_the_wait_up_to_a_minute() -> None:
    delays = [BACKOFF.delay_s(count) for count in range(10)]
    assert delays == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert BACKOFF.delay_s(10_000) == 60


def test_a_process_is_started_once_and_not_before_its_time() -> None:
    course = StartHistory()
    assert course.may_start(0.0)
    assert not course.started(0.0).may_start(5.0)
    once = course.started(0.0).failed(9.0, "gone", BACKOFF)
    assert once.may_start(9.0)
    twice = once.started(9.0).failed(10.0, "gone", BACKOFF)
    assert not twice.may_start(10.9)
    assert twice.may_start(11.0)


def test_one_that_ran_long_enough_begins_anew() -> None:
    course = StartHistory()
    for now_s in (0.0, 10.0, 20.0):
        course = course.started(now_s).failed(now_s + 1, "gone", BACKOFF)
    assert course.num_failures == 3
    assert course.started(100.0).failed(109.9, "gone", BACKOFF).num_failures == 4
    assert course.started(100.0).failed(110.0, "gone", BACKOFF).num_failures == 1


@pytest.mark.parametrize(
    ("course", "now_s", "retry_after_s"),
    [
        (StartHistory(1, 10.0, None, "gone"), 8.5, 22),  # 1.5 s until its start, 20 s for it
        (StartHistory(1, 10.0, None, "gone"), 15.0, 20),
        (StartHistory(1, 10.0, 10.0, "gone"), 15.0, 15),
        (StartHistory(1, 10.0, 10.0, "gone"), 500.0, 1),
    ],
)
def test_a_retry_is_told_how_long_to_wait(
    course: StartHistory, now_s: float, retry_after_s: int
) -> None:
    assert course.retry_after_s(now_s, start_s=20.0) == retry_after_s


def test_what_is_the_matter_is_said_in_words() -> None:
    course = StartHistory()
    assert course.words("backend hip", 0.0) == "backend hip is down"
    assert course.started(0.0).words("backend hip", 0.0) == "backend hip is being started"
    course = course.started(0.0).failed(5.0, "ended by SIGKILL", BACKOFF)
    assert course.words("backend hip", 5.0) == (
        "backend hip failed and will be restarted now: ended by SIGKILL"
    )
    course = course.started(6.0).failed(7.0, "no memory", BACKOFF)
    assert course.words("backend hip", 7.5) == (
        "backend hip failed (failure 2 in a row) and will be restarted in 1 s: no memory"
    )
    assert course.started(60.0).words("backend hip", 60.0) == (
        "backend hip failed (failure 2 in a row) and is being restarted: no memory"
    )


def test_silence_counts_while_this_process_is_awake() -> None:
    heartbeat = Heartbeat(interval_s=1.0, deadline_s=5.0)
    silent_s = 0.0
    for passed_s in (1.0, 1.25, 3600.0, 1.0):  # a whole machine has slept for an hour
        silent_s = heartbeat.silent_s(silent_s, passed_s)
        assert not heartbeat.is_hung(silent_s)
    assert silent_s == 4.0
    assert heartbeat.is_hung(heartbeat.silent_s(silent_s, 1.0))


SECONDS = st.floats(0.0, 1e4)


@pytest.mark.parametrize(
    ("took_s", "expected_s"),
    [
        ([], FIRST_S),
        ([0.001] * (NUM_FIRST - 1), FIRST_S),  # kernels may be compiled yet
        ([0.001] * NUM_FIRST, LEAST_S),
        ([4.0, 0.1, 0.1], 80.0),
        ([40.0, 0.1, 0.1], FIRST_S),
    ],
)
def test_the_slowest_one_so_far_says_it(took_s, expected_s):
    seen = CallTimes()
    for seconds in took_s:
        seen = seen.after(seconds)
    assert deadline_s(seen) == expected_s


@given(st.lists(SECONDS), SECONDS)
def test_a_slower_call_never_shortens_it_once_they_are_known(took_s, seconds):
    seen = CallTimes(NUM_FIRST, 0.0)
    for each in took_s:
        seen = seen.after(each)
    assert LEAST_S <= deadline_s(seen) <= deadline_s(seen.after(seconds)) <= FIRST_S


def test_calls_of_another_kind_or_size_say_nothing():
    deadlines = CallDeadlines()
    for _ in range(NUM_FIRST):
        deadlines.took(CallKind("prefill", 512), 0.1)
    assert deadlines.deadline_s(CallKind("prefill", 300)) == LEAST_S
    for other in (CallKind("prefill", 513), CallKind("prefill", 256), CallKind("decode", 512)):
        assert deadlines.deadline_s(other) == FIRST_S
    assert (deadlines.num_calls, deadlines.seconds) == (NUM_FIRST, pytest.approx(0.3))
