"""Shared memory is trusted only if the packet and the sequence numbers there agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.errors import ChannelClosed
from luceasync.ipc.packets import PayloadSpan
from luceasync.ipc.shared import ALIGN_BYTES, RingLedger, RingPlace, Watermark, lay_out
from tests.ipc.ends import DEADLINE_S, SESSION, SOON_S, Ends, Say, make_ends, packet, send_bytes

THEIR_RING = range(4096 + (1 << 16), 4096 + (2 << 16))  # what the child writes


def tell(ends: Ends, span: PayloadSpan) -> None:
    """The child's word of a payload."""
    ends.control_there.send(packet(Say(), payload=span))


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (PayloadSpan(THEIR_RING.start + 256, 10, SESSION), f"where payload {SESSION + 1} lies"),
        (PayloadSpan(THEIR_RING.start, 10, SESSION), "outside of"),  # no room for its number
        (PayloadSpan(4096 + 256, 10, SESSION), "outside of"),  # this end's own ring
        (PayloadSpan(THEIR_RING.stop - 256, 257, SESSION), "outside of"),
        (PayloadSpan(THEIR_RING.start + 256, 1 << 61, SESSION), "outside of"),
        (PayloadSpan(1 << 61, 10, SESSION), "outside of"),
        (PayloadSpan(THEIR_RING.start + 257, 10, SESSION), "not at a multiple of 256"),
    ],
)
def test_a_payload_that_is_not_there_closes_the_channel(
    shared_ends: Ends, span: PayloadSpan, words: str
) -> None:
    rings = shared_ends.rings_there
    assert rings is not None
    rings.memory.view.cast("Q")[THEIR_RING.start // 8] = SESSION + 1
    tell(shared_ends, span)
    with pytest.raises(ChannelClosed, match=words):
        shared_ends.here.receive(DEADLINE_S)


def test_the_same_payload_is_not_taken_twice(shared_ends: Ends) -> None:
    send_bytes(shared_ends.there, b"one")
    got = shared_ends.here.receive(DEADLINE_S)
    assert got.payload is not None
    span = got.payload.lend(shared_ends.rings.memory if shared_ends.rings else None)
    shared_ends.control_there.send(packet(Say(), 2, payload=span))
    with pytest.raises(ChannelClosed, match=f"payload {SESSION} again"):
        shared_ends.here.receive(DEADLINE_S)


def test_a_payload_that_is_written_while_it_is_read_is_noticed(shared_ends: Ends) -> None:
    send_bytes(shared_ends.there, b"one")
    payload = shared_ends.here.receive(DEADLINE_S).payload
    assert payload is not None and shared_ends.rings_there is not None
    payload.view(3)
    shared_ends.rings_there.memory.view.cast("Q")[THEIR_RING.start // 8] = 0
    with pytest.raises(ChannelClosed, match="written while it was read"):
        payload.free()


def test_a_reader_that_claims_more_than_was_sent_closes_the_channel(shared_ends: Ends) -> None:
    assert shared_ends.rings_there is not None
    shared_ends.rings_there.memory.view.cast("Q")[0] = SESSION + 5
    with pytest.raises(ChannelClosed, match=f"have read payload {SESSION + 5}, which was not sent"):
        shared_ends.here.reserve(10, SOON_S)


def test_a_place_is_given_again_only_when_it_has_been_read(shared_ends: Ends) -> None:
    for _ in range(2):
        send_bytes(shared_ends.here, bytes(30_000))
    payloads = [shared_ends.there.receive(DEADLINE_S).payload for _ in range(2)]
    assert all(payloads)
    assert payloads[1] is not None
    payloads[1].free()  # the older one is still read
    with pytest.raises(ChannelClosed, match="for it to read"):
        shared_ends.here.reserve(30_000, SOON_S)


def test_a_payload_is_passed_on_by_reference() -> None:
    """What a child wrote, another child reads where it lies; the parent copies nothing."""
    ends = make_ends("shared")
    send_bytes(ends.there, b"from a child")
    got = ends.here.receive(DEADLINE_S)
    assert got.payload is not None
    ends.here.forward(Say(), got.payload, deadline_s=DEADLINE_S)
    passed = ends.there.receive(DEADLINE_S).payload
    assert passed is not None
    assert bytes(passed.view(12)) == b"from a child"
    passed.free()
    got.payload.free()
    assert ends.here.traffic.payload_bytes_sent == 0
    assert ends.here.traffic.payload_bytes_lent == 12
    ends.close()


def test_a_payload_that_was_overwritten_on_its_way_is_noticed() -> None:
    ends = make_ends("shared")
    send_bytes(ends.there, b"old")
    got = ends.here.receive(DEADLINE_S)
    assert got.payload is not None
    ends.here.forward(Say(), got.payload, deadline_s=DEADLINE_S)
    got.payload.free()  # too early
    send_bytes(ends.there, b"new")
    with pytest.raises(ChannelClosed, match=f"where payload {SESSION + 1} lies"):
        ends.there.receive(DEADLINE_S)
    ends.close()


def test_a_payload_of_another_memory_is_copied() -> None:
    first, second = make_ends("shared"), make_ends("shared")
    send_bytes(first.there, b"elsewhere")
    got = first.here.receive(DEADLINE_S)
    assert got.payload is not None
    second.here.forward(Say(), got.payload, deadline_s=DEADLINE_S)
    passed = second.there.receive(DEADLINE_S).payload
    assert passed is not None
    assert bytes(passed.view(9)) == b"elsewhere"
    assert second.here.traffic.payload_bytes_sent == 9
    got.payload.free()
    first.close()
    second.close()


RING_BYTES = 20 * ALIGN_BYTES
KEPT = 2 * ALIGN_BYTES  # of a payload of a few bytes, with what stands before it


def taken(place: RingPlace) -> range:
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
