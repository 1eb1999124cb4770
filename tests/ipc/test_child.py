"""A process ends when it is told to, is reaped whatever it does, and its log is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from luceasync.ipc.child import MAX_LINE_BYTES, NUM_LINES, Child, LogLines

DEADLINE_S = 30.0


def start(code: str) -> Child:
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    return Child(process, lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("pass", "its process ended with status 0"),
        ("raise SystemExit('no')", "its process ended with status 1; its last lines:\n  no"),
        ("import os; os.kill(os.getpid(), 11)", "its process was ended by SIGSEGV"),
    ],
)
def test_its_end_is_told_before_and_after_it_is_reaped(code: str, words: str) -> None:
    child = start(code)
    child.end(DEADLINE_S, DEADLINE_S)
    assert child.last_words() == words
    assert child.is_over and not child.is_alive()


@pytest.mark.slow
def test_one_that_lives_says_that_it_does() -> None:
    child = start("import sys, time; print('here', file=sys.stderr); time.sleep(600)")
    deadline = time.monotonic() + DEADLINE_S
    while "here" not in child.last_words() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert child.last_words() == "its process lives; its last lines:\n  here"
    assert child.is_alive()
    child.end(0, DEADLINE_S)


@pytest.mark.slow
def test_one_that_takes_no_signal_is_killed_when_its_grace_is_over() -> None:
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    child = start(f"import signal, time; {block}; time.sleep(600)")
    child.end(0.5, DEADLINE_S)
    assert child.last_words() == "its process was ended by SIGKILL"


@pytest.mark.slow
def test_threads_may_end_it_at_once_and_ask_meanwhile() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        child = start("import time; time.sleep(600)")
        go = threading.Barrier(8)

        def ask(child: Child, go: threading.Barrier, number: int) -> str:
            go.wait(DEADLINE_S)
            if number % 2:
                child.end(0, DEADLINE_S)
            else:
                while child.is_alive():
                    child.last_words()
            return child.last_words()

        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, child, go, number) for number in range(8)]
        assert [each.result() for each in asked] == ["its process was ended by SIGKILL"] * 8
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.slow
def test_nothing_is_left_of_it() -> None:
    before = os.listdir("/proc/self/fd")
    child = start("pass")
    child.end(DEADLINE_S, DEADLINE_S)
    assert os.listdir("/proc/self/fd") == before
    assert not os.path.exists(f"/proc/{child.pid}")


@pytest.mark.slow
def test_nothing_is_left_of_one_that_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(pid: int) -> int:
        raise OSError(24, "Too many open files")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "pidfd_open", none)
    with pytest.raises(OSError, match="Too many open files"):
        start("import time; time.sleep(600)")
    assert os.listdir("/proc/self/fd") == before


def read(content: bytes) -> tuple[list[str], list[str]]:
    """The last lines of a log with this content, and all lines that `on_line` got."""
    reading, writing = os.pipe()
    told: list[str] = []
    lines = LogLines(reading, told.append)
    os.write(writing, content)
    os.close(writing)
    last = lines.last(5.0)
    lines.close()
    lines.close()
    return last, told


def test_the_last_lines_are_kept_and_all_are_told() -> None:
    last, told = read(b"".join(b"line %d\n" % number for number in range(100)))
    assert told == [f"line {number}" for number in range(100)]
    assert last == told[-NUM_LINES:]


def test_a_line_without_an_end_is_one() -> None:
    assert read(b"one\ntwo")[0] == ["one", "two"]
    assert read(b"")[0] == []


def test_a_log_without_lines_is_cut_into_some() -> None:
    last, _ = read(b"x" * (3 * MAX_LINE_BYTES))
    assert [len(line) for line in last] == [MAX_LINE_BYTES] * 3


def test_bytes_that_are_no_text_are_kept_as_far_as_they_can_be() -> None:
    assert read(b"caf\xe9\n")[0] == ["caf\ufffd"]


def test_reading_ends_when_it_is_closed_though_the_log_goes_on() -> None:
    reading, writing = os.pipe()
    lines = LogLines(reading, lambda line: None)
    lines.close()
    os.close(writing)
