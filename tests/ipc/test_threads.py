"""A thread that does not end when it is told to is left behind, in words; its descriptors stay."""

from __future__ import annotations

import os
import threading

import pytest

from luceasync.ipc import heartbeat
from luceasync.ipc.child import LogLines
from luceasync.ipc.heartbeat import has_ended


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
    """Whoever is told of its lines writes to a pipe that nobody reads, for example."""
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
