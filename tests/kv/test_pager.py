"""A pager's plans: what must be saved, what moves, and what equals full attention."""

from __future__ import annotations

import math
from typing import Any

import pytest

from luceasync.kv.pager import KvFlashPager
from luceasync.kv.pages import PageEvent
from luceasync.kv.residency import NoVictim

NUM_PAGES = 9


def pager(**fields: Any) -> KvFlashPager:
    return KvFlashPager(2, NUM_PAGES, **{"batch_tokens": 64, "tau_tokens": 64, **fields})


def grow(lanes: KvFlashPager, lane: int, num_tokens: int) -> list[tuple[int, int]]:
    """Grow a lane chunk by chunk; returns the spans that had to be saved."""
    saved = []
    for end in range(64, num_tokens + 1, 64):
        growth = lanes.plan_growth(lane, end)
        if growth is not None:
            saved += [growth.unsaved] if growth.unsaved else []
            lanes.apply_growth(growth)
    return saved


def test_what_leaves_is_saved_unless_a_node_holds_it():
    lanes = pager()
    assert grow(lanes, 0, NUM_PAGES * 64) == []
    growth = lanes.plan_growth(0, NUM_PAGES * 64 + 1)
    assert growth.unsaved == (0, 128)  # the sink, and chunk 1, which is to leave
    assert lanes.apply_growth(growth) == [PageEvent(0, 1, None), PageEvent(0, 9, 1)]
    assert lanes.num_own_tokens == 128
    lanes.mark_in_node(0, 0, 400)
    growth = lanes.plan_growth(0, (NUM_PAGES + 2) * 64)
    assert growth.unsaved is None and growth.change.evicted == (2,)


def test_whole_chunks_may_be_saved_before_they_leave():
    lanes = pager()
    grow(lanes, 0, NUM_PAGES * 64)
    assert lanes.unsaved(0, 200) == (0, 192)
    lanes.mark_saved(0, 0, 192)
    assert lanes.unsaved(0, 200) is None and lanes.num_own_tokens == 192
    assert lanes.plan_growth(0, NUM_PAGES * 64 + 1).unsaved is None
    lanes.mark_in_node(0, 192, 500)
    assert lanes.unsaved(0, 512) == (500, 512)


def test_what_a_node_holds_is_no_lanes_own_any_more():
    lanes = pager()
    grow(lanes, 0, NUM_PAGES * 64)
    lanes.mark_saved(0, 0, 64)
    lanes.mark_saved(0, 64, 192)
    lanes.mark_in_node(0, 0, 128)
    assert lanes.num_own_tokens == 128  # one span, which the node holds in part
    lanes.mark_in_node(0, 128, 300)
    assert lanes.num_own_tokens == 128
    lanes.mark_in_node(0, 0, 300)
    assert lanes.num_own_tokens == 0


def test_a_node_that_leaves_a_gap_holds_nothing_of_use():
    lanes = pager()
    grow(lanes, 0, NUM_PAGES * 64)
    lanes.mark_in_node(0, 64, 500)
    assert lanes.plan_growth(0, NUM_PAGES * 64 + 1).unsaved == (0, 128)


def test_nothing_has_changed_until_it_is_done():
    lanes = pager()
    grow(lanes, 0, NUM_PAGES * 64)
    for _ in range(2):  # as if the first could not be saved
        assert lanes.plan_growth(0, NUM_PAGES * 64 + 1).unsaved == (0, 128)
    assert lanes.num_absent(0) == 0 and lanes.num_own_tokens == 0


def test_what_was_decoded_while_something_was_absent_is_not_exact():
    lanes = pager()
    grow(lanes, 0, NUM_PAGES * 64)
    lanes.mark_decoded(0, 500)
    assert lanes.exact_end(0, 570) == 570
    grow(lanes, 0, (NUM_PAGES + 1) * 64)
    lanes.mark_decoded(0, 580)
    lanes.mark_decoded(0, 600)
    assert lanes.exact_end(0, 570) == 570 and lanes.exact_end(0, 640) == 580
    lanes.release(0)
    assert lanes.exact_end(0, 640) == 640


def test_masses_move_chunks_and_those_to_come_are_absent_until_they_are_listed():
    lanes = pager()
    lanes.mark_in_node(0, 0, 2048)
    grow(lanes, 0, 1280)
    assert lanes.pages(0) and lanes.num_absent(0) == 20 - NUM_PAGES
    lanes.probe_started(0, 1280)
    lanes.score(0, [9.0 if chunk == 5 else 0.0 for chunk in range(20)])
    move = lanes.apply_selection(lanes.plan_selection(0))
    [(chunk, page)] = move.coming
    assert chunk == 5 and move.gone == (PageEvent(0, 12, None),)
    assert lanes.num_absent(0) == 20 - NUM_PAGES + 1
    lanes.mark_decoded(0, 1280)
    assert lanes.list_recalled(0) == [PageEvent(0, 5, page)] and lanes.list_recalled(0) == []
    counts = lanes.counts(0)
    assert (counts.recalled, counts.evicted, counts.probes) == (1, 20 - NUM_PAGES + 1, 1)
    lanes.release(0)
    assert lanes.totals == counts and lanes.counts(0).probes == 0


def test_a_look_is_due_by_crossing_and_only_while_something_is_absent():
    lanes = pager()
    lanes.mark_in_node(0, 0, 2048)
    grow(lanes, 0, 512)
    assert not lanes.is_due(0, 5000)
    grow(lanes, 0, 1280)
    lanes.probe_started(0, 1280)
    assert not lanes.is_due(0, 1343) and lanes.is_due(0, 1344) and lanes.is_due(0, 1400)


def test_a_ledger_says_what_a_restored_lane_holds():
    lanes = pager()
    lanes.mark_in_node(0, 0, 2048)
    grow(lanes, 0, 1280)
    lanes.score(0, [float(chunk in (3, 7, 8)) for chunk in range(20)])
    lanes.apply_selection(lanes.plan_selection(0))
    lanes.list_recalled(0)
    ledger = lanes.ledger(0, 1280)
    assert len(ledger) == 20 and ledger[3][1] == 1.0
    events = lanes.restore(1, 1280, ledger)
    assert [event.chunk for event in events] == [0, 3, 7, 8, 15, 16, 17, 18, 19]
    events = lanes.restore(1, 1280, [(False, math.nan)] * 20)
    assert [event.chunk for event in events] == [0, *range(12, 20)]
    assert lanes.plan_growth(1, 1344).unsaved is None


def test_pins_of_all_lanes_and_of_one():
    lanes = pager(pins=[(64, 65)])
    with pytest.raises(NoVictim, match="2 may be"):
        lanes.pin(0, [(128, 300)])
    lanes.pin(0, [(200, 210)])
    assert [lanes.is_pinned(0, chunk) for chunk in range(5)] == [False, True, False, True, False]
    lanes.mark_in_node(0, 0, 2048)
    grow(lanes, 0, 1280)
    assert {e.chunk for e in lanes.restore(0, 1280, [])} >= {0, 1, 3}
    lanes.release(0)
    assert [lanes.is_pinned(0, chunk) for chunk in (1, 3)] == [True, False]
