"""A process gives signs of life whatever it is doing, unless it is stopped; numbers complete."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from luceasync.ipc import heartbeat
from luceasync.ipc.child import LogLines
from luceasync.ipc.heartbeat import (
    MAX_EARLY,
    NUMBER_BYTES,
    CompletionWaiters,
    HeartbeatResponder,
    ProcessWatch,
    has_ended,
)
from luceasync.ipc.supervised import Heartbeat

DEADLINE_S = 30.0
SOON = Heartbeat(interval_s=0.02, deadline_s=0.3)
ROOT = Path(__file__).parents[2]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Watched:
    """A process that answers from its first line on, and then runs `code`."""

    def __init__(self, code: str, heartbeat: Heartbeat = SOON) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel, channel_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        completions, completions_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        begin = (
            "import socket, sys, time; from luceasync.ipc.heartbeat import HeartbeatResponder; "
            f"responder = HeartbeatResponder(socket.socket(fileno={there.fileno()})); "
            f"channel = socket.socket(fileno={channel_there.fileno()}); "
            "from luceasync.ipc.heartbeat import CompletionSender; "
            f"completions = CompletionSender(socket.socket(fileno={completions_there.fileno()})); "
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin + code],
            pass_fds=[there.fileno(), channel_there.fileno(), completions_there.fileno()],
            env={"PYTHONPATH": str(ROOT)},
        )
        there.close()
        channel_there.close()
        completions_there.close()
        self.completions = CompletionWaiters()
        self.pidfd = os.pidfd_open(self.process.pid)
        self.hung: list[str] = []
        self.ended: list[float] = []
        self.watch = ProcessWatch(
            here,
            self.channel.fileno(),
            self.pidfd,
            heartbeat,
            completions,
            self.completions,
            self.hung.append,
            lambda: self.ended.append(time.time()),
        )

    def close(self) -> None:
        self.process.kill()
        self.watch.close()
        self.watch.close()
        self.process.wait()
        os.close(self.pidfd)
        self.channel.close()


@pytest.mark.slow
def test_one_that_keeps_the_interpreter_for_itself_is_not_hung():
    # A regular expression that backtracks is one step of the interpreter.
    code = "import re; time.sleep(0.1); re.match('(a|a)*b', 'a' * 40)"
    watched = Watched(code)
    until(lambda: watched.watch.age_s is not None)
    time.sleep(3 * SOON.deadline_s)
    assert watched.process.poll() is None
    assert watched.hung == []
    watched.close()


@pytest.mark.slow
def test_one_that_is_stopped_is_hung_and_its_end_is_told():
    watched = Watched("time.sleep(600)")
    until(lambda: watched.watch.age_s is not None)
    os.kill(watched.process.pid, signal.SIGSTOP)
    until(lambda: bool(watched.hung))
    assert not watched.watch.has_ended.is_set()
    assert watched.ended == []
    os.kill(watched.process.pid, signal.SIGKILL)
    until(watched.watch.has_ended.is_set)
    until(lambda: len(watched.ended) == 1)
    assert watched.hung == ["it gave no sign of life for 0.3 s"]
    watched.close()


@pytest.mark.slow
def test_the_end_of_the_channel_is_the_end_whoever_still_answers():
    # Of the threads that end the last one closes its sockets only after all memory is given back.
    watched = Watched("channel.close(); time.sleep(600)")
    until(watched.watch.has_ended.is_set)
    until(lambda: len(watched.ended) == 1)
    assert watched.process.poll() is None
    watched.close()


@pytest.mark.slow
def test_before_its_first_sign_it_has_time():
    watched = Watched("", Heartbeat(interval_s=0.001, deadline_s=0.002))
    until(watched.watch.has_ended.is_set)
    watched.close()


@pytest.mark.slow
def test_the_thread_that_answers_alone_has_its_socket():
    # Then its death is seen before all memory of the process has been given back: the system closes
    # what a thread has when that thread ends, and what the process has last of all.
    watched = Watched("import torch; time.sleep(600)")
    until(lambda: watched.watch.age_s is not None)
    tasks = Path(f"/proc/{watched.process.pid}/task")
    counts = sorted(len(list((task / "fd").iterdir())) for task in tasks.iterdir())
    assert counts[0] == 2  # the socket, and what ends the thread
    until(lambda: num_sockets(watched.process.pid) == 2)  # the heartbeat socket is closed
    watched.close()


def num_sockets(pid: int) -> int:
    """Of the process's first thread."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # what is being imported is closed just now
            links.append(os.readlink(link))
    return len([link for link in links if link.startswith("socket:")])


def test_the_responder_ends_with_either_end():
    before = os.listdir("/proc/self/fd")
    for is_theirs in (True, False):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answering = HeartbeatResponder(there)
        here.send(b"?")
        assert here.recv(8) == b"?"
        if is_theirs:
            here.close()
        answering.close()
        answering.close()
        here.close()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.slow
def test_what_is_over_is_heard_and_so_is_an_end_before_it():
    watched = Watched("completions.send(7); time.sleep(0.2)")
    heard: list[tuple[int, bool]] = []
    for number in (7, 8):
        watched.completions.expect(number, lambda told, number=number: heard.append((number, told)))
    until(lambda: len(heard) == 2)
    assert heard == [(7, True), (8, False)] and watched.watch.has_ended.is_set()
    watched.close()


@pytest.mark.slow
def test_one_that_tells_what_is_no_number_is_ended():
    watched = Watched("completions._socket.send(b'half'); time.sleep(600)")
    until(lambda: watched.hung)
    assert watched.hung == ["it completed what was not waited for"]
    watched.close()


def packet(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "little")


def test_numbers_complete_in_any_order() -> None:
    completions, heard = CompletionWaiters(), []
    for number in (1, 2):
        completions.expect(number, lambda told, number=number: heard.append((number, told)))
    assert (
        completions.came(packet(2)) and completions.came(packet(3)) and completions.came(packet(1))
    )
    completions.expect(3, lambda told: heard.append((3, told)))
    assert heard == [(2, True), (1, True), (3, True)]


def test_an_end_completes_all_calls_then_and_later() -> None:
    completions, heard = CompletionWaiters(), []
    completions.came(packet(9))
    completions.expect(1, heard.append)
    completions.end()
    completions.end()
    completions.expect(2, heard.append)
    completions.expect(9, heard.append)  # it has completed before
    assert heard == [False, False, True]


def test_what_is_no_number_or_too_many_is_noticed() -> None:
    assert not CompletionWaiters().came(b"1234")
    completions = CompletionWaiters()
    came = [completions.came(packet(number)) for number in range(MAX_EARLY + 1)]
    assert came == [True] * MAX_EARLY + [False]


def test_one_that_ends_is_waited_for() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    assert has_ended(thread)


def test_one_that_hangs_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "JOIN_S", 0.01)
    hung = threading.Event()
    thread = threading.Thread(target=hung.wait, name="hangs", daemon=True)
    thread.start()
    assert not has_ended(thread)
    assert "thread 'hangs' did not end within 0.01 s" in caplog.text
    hung.set()
    thread.join()


def test_a_log_whose_reader_hangs_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `on_line` wrote to a full pipe."""
    monkeypatch.setattr(heartbeat, "JOIN_S", 0.01)
    hung, told, (reading, writing) = threading.Event(), threading.Event(), os.pipe()

    def hang(line: str) -> None:
        told.set()
        hung.wait()

    lines = LogLines(reading, hang)
    os.write(writing, b"line\n")
    told.wait(20.0)
    lines.close()
    os.fstat(reading)  # the thread has it still
    hung.set()
    lines._thread.join(20.0)
    for fd in (reading, writing):
        os.close(fd)
