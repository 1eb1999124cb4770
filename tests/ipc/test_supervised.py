"""A process that is started again: what is said of it, and what its lives have counted together."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from luceasync.errors import ChannelClosed, PeerMismatch, Unavailable
from luceasync.ipc.channel import Statement
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.ipc.supervised import Backoff, CallKind, Supervised
from tests.ipc.echo_child import Ask, Tell

pytestmark = pytest.mark.slow

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


def supervised(launcher: LocalLauncher, stopping: threading.Event | None = None) -> Supervised:
    backoff = Backoff(second_s=0.2, longest_s=600.0)
    return Supervised(launcher, "group 7", ("hip:0",), stopping or threading.Event(), backoff)


def start(process: Supervised, mode: str = "echo"):
    return process.start([str(CHILD), mode], (Tell,), Statement(), DEADLINE_S)


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
    words = "group 7 failed and will be started again now: "
    assert process.status.detail == words + "it has ended, or hangs"
    process.failed("the reason")
    process.failed("said twice")
    assert process.status.detail == words + "the reason"


def test_all_its_lives_count(launcher: LocalLauncher):
    process = supervised(launcher)
    sent = []
    for _ in range(2):
        life = start(process)
        process.arrived()
        life.started.channel.call(Ask("x" * 1000), Tell, deadline_s=DEADLINE_S)
        life.pace.took(CallKind("ask"), 0.5)
        sent.append(process.status.sent_bytes_total)
    process.stop()
    status = process.status
    assert (status.num_starts, status.calls_total, status.call_s_total) == (2, 2, 1.0)
    assert sent[1] >= sent[0] + 1000
    assert status.sent_bytes_total == sent[1]
    assert (status.resident_bytes, status.heartbeat_age_s) == (0, None)


def test_a_start_that_comes_to_nothing_leaves_nothing(launcher: LocalLauncher):
    process = supervised(launcher)
    with pytest.raises(PeerMismatch, match=r"luceasync 0\.0 here"):
        start(process, "version")
    assert "luceasync 0.0 here" in process.status.detail
    assert process.status.resident_bytes == 0


def test_a_second_failure_in_a_row_is_waited_after_unless_nobody_does(launcher: LocalLauncher):
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
