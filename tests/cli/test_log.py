"""Logging never blocks."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from luceasync.cli import serve
from luceasync.cli.serve import BackgroundLogHandler


class Stuck(io.StringIO):
    """A suspended terminal: `write` blocks until it resumes."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        assert self.goes_on.wait(20)
        return super().write(text)


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def record(words: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, __file__, 1, words, (), None)


def test_lines_are_written_in_order_and_completely_before_close():
    out = io.StringIO()
    handler = BackgroundLogHandler(out)
    for i in range(100):
        handler.emit(record(f"line {i}"))
    handler.close()
    assert [line.split(" INFO ")[1] for line in out.getvalue().splitlines()] == [
        f"line {i}" for i in range(100)
    ]


def test_a_suspended_terminal_does_not_block_and_the_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(serve, "CLOSE_TIMEOUT_S", 0.0)
    out = Stuck()
    handler = BackgroundLogHandler(out, max_waiting=10)
    for i in range(1000):
        handler.emit(record(f"line {i}"))
    handler.close()
    out.goes_on.set()
    handler._thread.join(0.5)
    assert 10 <= len(out.getvalue().splitlines()) <= 1 + 10 + 10  # taken, then waiting


@pytest.mark.parametrize("num_lines", [1, 5])
def test_a_closed_pipe_does_no_harm(num_lines):
    handler = BackgroundLogHandler(Gone())
    for _ in range(num_lines):
        handler.emit(record("x"))
    handler.close()
