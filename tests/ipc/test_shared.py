"""What lies in shared memory is believed only as far as the packet and the numbers there agree."""

from __future__ import annotations

import pytest

from luceasync.errors import ChannelClosed
from luceasync.ipc.packets import Span
from tests.ipc.ends import DEADLINE_S, SESSION, SOON_S, Ends, Say, make_ends, packet, send_bytes

THEIR_RING = range(4096 + (1 << 16), 4096 + (2 << 16))  # what the child writes


def tell(ends: Ends, span: Span) -> None:
    """The child's word of a payload."""
    ends.control_there.send(packet(Say(), payload=span))


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (Span(THEIR_RING.start + 256, 10, SESSION), f"where payload {SESSION + 1} lies"),
        (Span(THEIR_RING.start, 10, SESSION), "outside of"),  # no room for its number
        (Span(4096 + 256, 10, SESSION), "outside of"),  # this end's own ring
        (Span(THEIR_RING.stop - 256, 257, SESSION), "outside of"),
        (Span(THEIR_RING.start + 256, 1 << 61, SESSION), "outside of"),
        (Span(1 << 61, 10, SESSION), "outside of"),
        (Span(THEIR_RING.start + 257, 10, SESSION), "not at a multiple of 256"),
    ],
)
def test_a_payload_that_is_not_there_closes_the_channel(
    shared_ends: Ends, span: Span, words: str
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
    with pytest.raises(ChannelClosed, match=f"has read payload {SESSION + 5}, which was not sent"):
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
