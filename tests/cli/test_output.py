"""Sizes, ages and errors as text."""

from __future__ import annotations

import pytest

from luceasync.cli.output import age_text, count_text, one_line, plain_table, print_plain, size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_size_text(num_bytes, text):
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "now"),
        (59, "now"),
        (60, "1 min ago"),
        (7199, "1 h ago"),
        (86400 * 2, "2 days ago"),
        (86400 * 900, "900 days ago"),
    ],
)
def test_age_text(seconds, text):
    assert age_text(seconds) == text


def test_a_number_of_things():
    assert [count_text(number, "file") for number in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


def test_no_line_is_broken_at_the_width_of_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    table = plain_table("device", "bytes", names=("device",))
    table.add_row("a device with a long name", "1016.3 MiB")
    print_plain("word " * 10, table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "word " * 10
    assert lines[2] == "a device with a long name  1016.3 MiB"


def test_an_error_is_one_line_without_control_characters():
    assert one_line("a\nb\x1b[31m\u2028 é 日本") == "a\\nb\\x1b[31m\\u2028 é 日本"
    assert one_line(ValueError("plain")) == "plain"
