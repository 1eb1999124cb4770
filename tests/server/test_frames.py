"""Frames are cut where they end, however they come, and what asks for nothing is paid for."""

from __future__ import annotations

import pytest

from luceasync.server import frames
from luceasync.server.frames import PREFACE, Allowance, Frames, Purse


def frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 1]) + payload


SAID = [PREFACE, frame(4), frame(0, b"x" * 300), frame(3, bytes(4)), frame(6, bytes(8))]


@pytest.mark.parametrize("step", [1, 7, 24, 1000])
def test_the_same_frames_however_they_come(step):
    data, cutter, found = b"".join(SAID), Frames(), []
    for begin in range(0, len(data), step):
        found += cutter.cut(data[begin : begin + step])
    assert found == SAID


def test_a_frame_longer_than_allowed_is_not_waited_for():
    cutter = Frames()
    assert list(cutter.cut(PREFACE)) == [PREFACE]
    head = b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"
    assert list(cutter.cut(head)) == [head]


def test_what_is_no_preface_is_not_waited_for():
    assert list(Frames().cut(b"GET")) == [b"GET"]


def test_an_allowance_is_spent_and_comes_back_with_time():
    now = [0.0]
    allowance = Allowance(2.0, 10.0, lambda: now[0])
    assert [allowance.take() for _ in range(3)] == [True, True, False]
    now[0] += 0.2
    assert allowance.take()
    now[0] += 3600.0
    assert [allowance.take() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("kind", [3, 2, 4, 6, 8, 9, 77])
def test_frames_that_ask_for_nothing_are_bounded(kind):
    purse = Purse()
    assert not all(purse.pay_for(frame(kind, bytes(5))) for _ in range(2000))


def test_requests_and_bodies_are_free_and_crumbs_of_them_are_not():
    purse, crumbs = Purse(), Purse()
    assert all(purse.pay_for(frame(1, b"x")) for _ in range(5000))
    assert all(purse.pay_for(frame(0, bytes(frames.SMALL_DATA_BYTES))) for _ in range(5000))
    assert not all(crumbs.pay_for(frame(0, b"x")) for _ in range(5000))


def test_whoever_is_sent_much_may_say_much():
    purse = Purse()
    for _ in range(5000):
        purse.paid_back()
        assert purse.pay_for(frame(8, bytes(4)))
