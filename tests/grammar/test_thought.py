"""Reasoning begins and ends where the text says it, whatever tokens that is written in."""

from __future__ import annotations

import pytest

from luceasync.grammar.guide import Limit, Thought

CLOSE = b"\n</think>"


def thought(phase: str, most: int = 4) -> Thought:
    """Tokens are bytes."""
    return Thought(Limit(most, tuple(CLOSE), lambda token: bytes([token])), phase)


def after(start: Thought, text: bytes) -> Thought:
    for byte in text:
        start = start.after(byte)
    return start


@pytest.mark.parametrize(
    ("phase", "text", "then"),
    [
        ("open", b"abc", "open"),
        ("open", b"a</think>", "closed"),
        ("open", b"a</thin</think>", "closed"),
        ("perhaps", b"", "perhaps"),
        ("perhaps", b"\n <th", "perhaps"),
        ("perhaps", b"\n<think>", "open"),
        ("perhaps", b"<think>why</think>", "closed"),
        ("perhaps", b"<tool", "closed"),
        ("perhaps", b"no <think>", "closed"),
        ("closed", b"<think>", "closed"),
    ],
)
def test_phases(phase, text, then):
    assert after(thought(phase, 1000), text).phase == then


def test_it_is_counted_from_its_opening_and_closed_at_its_limit():
    start = after(thought("perhaps"), b"<think>")
    assert start.forced == () and start.num_tokens == 0
    spent = after(start, b"abcd")
    assert spent.forced == tuple(CLOSE)
    for i, token in enumerate(CLOSE):
        assert spent.forced == tuple(CLOSE[i:])
        spent = spent.after(token)
    assert spent.phase == "closed" and spent.forced == ()


def test_without_any_it_is_closed_at_once():
    assert thought("open", 0).forced == tuple(CLOSE)
