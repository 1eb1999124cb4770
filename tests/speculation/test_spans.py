"""Which positions a lane holds: the last ones, without a gap."""

from __future__ import annotations

import pytest

from luceasync.speculation.dflash.features import LaneSpans


def test_a_lane_holds_the_last_positions_that_were_written():
    spans = LaneSpans(2, 8)
    spans.advance(1, 0, 5)
    spans.advance(1, 5, 6)
    assert spans.valid(1) == range(3, 11)
    assert spans.valid(0) == range(0)
    spans.reset(1)
    assert spans.valid(1) == range(0)


def test_a_gap_begins_anew():
    spans = LaneSpans(1, 8)
    spans.advance(0, 0, 5)
    spans.advance(0, 7, 2)
    assert spans.valid(0) == range(7, 9)


@pytest.mark.parametrize(
    ("begin", "end", "expected"), [(0, 11, range(3, 11)), (6, 9, range(6, 9)), (0, 3, range(3, 3))]
)
def test_a_node_carries_what_reaches_its_end(begin: int, end: int, expected: range):
    spans = LaneSpans(1, 8)
    spans.advance(0, 0, 11)
    assert spans.held(0, begin, end) == expected
    assert not spans.held(0, begin, 12)


@pytest.mark.parametrize(("num_lanes", "capacity"), [(0, 8), (1, 0)])
def test_sizes_under_one_are_refused(num_lanes: int, capacity: int):
    with pytest.raises(ValueError, match="at least 1 of each"):
        LaneSpans(num_lanes, capacity)


@pytest.mark.parametrize("lane", [-1, 2])
def test_a_lane_that_is_not_there_is_refused(lane: int):
    with pytest.raises(ValueError, match="0 to 1 are there"):
        LaneSpans(2, 8).valid(lane)
