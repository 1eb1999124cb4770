"""The last lines of a log are kept, however it is written."""

from __future__ import annotations

import os

from luceasync.ipc.child import MAX_LINE_BYTES, NUM_LINES, LogLines


def read(content: bytes) -> tuple[list[str], list[str]]:
    """The last lines, and all that were told, of a log with this in it."""
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
