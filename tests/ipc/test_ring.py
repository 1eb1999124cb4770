"""Places of a ring never overlap while they are in use, and come free in their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.ipc.shared import ALIGN_BYTES, Place, RingLedger, Watermark, lay_out

RING_BYTES = 20 * ALIGN_BYTES
KEPT = 2 * ALIGN_BYTES  # of a payload of a few bytes, with what stands before it


def taken(place: Place) -> range:
    """All bytes of the ring that belong to a place."""
    end = place.begin + -(-place.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return range(place.begin - ALIGN_BYTES, end)


@given(st.lists(st.one_of(st.integers(1, RING_BYTES - ALIGN_BYTES), st.just(None)), max_size=60))
def test_places_in_use_lie_in_the_ring_and_apart(steps: list[int | None]) -> None:
    """A number reserves so many bytes; None frees the oldest place."""
    ledger, in_use = RingLedger(RING_BYTES, 5), []
    for step in steps:
        if step is None:
            if in_use:
                ledger.free_until(in_use.pop(0).sequence)
            continue
        place = ledger.reserve(step)
        if place is None:
            assert in_use, "an empty ring has room for all that fits"
            continue
        mine = taken(place)
        assert mine.start >= 0 and mine.stop <= RING_BYTES and place.begin % ALIGN_BYTES == 0
        for other in map(taken, in_use):
            assert mine.stop <= other.start or other.stop <= mine.start
        in_use.append(place)
    assert [place.sequence for place in in_use] == sorted(place.sequence for place in in_use)


def test_an_empty_ring_gives_the_bytes_that_it_gave_before() -> None:
    ledger = RingLedger(RING_BYTES)
    first = ledger.reserve(10)
    assert first is not None
    ledger.free_until(first.sequence)
    second = ledger.reserve(10)
    assert second is not None and second.begin == first.begin
    assert second.sequence == first.sequence + 1


def test_a_full_ring_waits_and_goes_on_when_the_oldest_is_freed() -> None:
    ledger = RingLedger(3 * KEPT)
    places = [ledger.reserve(10) for _ in range(3)]
    assert ledger.reserve(10) is None
    ledger.free_until(1)
    again = ledger.reserve(10)
    assert again is not None and places[0] is not None and again.begin == places[0].begin
    assert ledger.reserve(10) is None


def test_what_never_fits_is_an_error_and_no_wait() -> None:
    ledger = RingLedger(RING_BYTES)
    assert ledger.reserve(ledger.largest_bytes) is not None
    with pytest.raises(ValueError, match="in a ring of"):
        RingLedger(RING_BYTES).reserve(ledger.largest_bytes + 1)


@given(st.permutations(range(8)))
def test_a_watermark_is_below_all_that_is_still_read(order: list[int]) -> None:
    mark, left = Watermark(10), set(range(10, 18))
    assert all(mark.came(sequence) for sequence in range(10, 18))
    for each in order:
        left.discard(10 + each)
        assert mark.done(10 + each) == min(left, default=18) - 1


def test_a_payload_that_is_not_newer_is_told() -> None:
    mark = Watermark()
    assert mark.came(3)
    assert not mark.came(3)
    assert not mark.came(2)
    assert mark.done(3) == 3  # 1 and 2 never came: they are freed with it


def test_rings_of_a_memory_lie_apart() -> None:
    num_bytes, regions = lay_out([5000, 4096, 1])
    assert [(each.begin, each.end) for each in regions] == [
        (4096, 12288),
        (12288, 16384),
        (16384, 20480),
    ]
    assert num_bytes == 20480
    assert len({each.word // 64 for each in regions}) == 3
