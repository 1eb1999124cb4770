"""A packet is the next one of its session, or it is refused in words."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.ipc.packets import MAX_PACKET_BYTES, Codec, Message, Packet, Span, WireError
from tests.ipc.ends import SESSION, Heard, Say


class Listed(Message, frozen=True):
    numbers: list[int]
    content: bytes
    named: dict[str, str]


def coder() -> Codec:
    return Codec(SESSION, (Say, Listed))


def raw(body: Message, number: int = 1, session: int = SESSION, **more: Any) -> bytes:
    return msgspec.msgpack.encode(Packet(session, number, body, **more))


def test_what_is_sent_comes_back_the_same() -> None:
    sender, receiver = coder(), coder()
    first = sender.encode(Say("one"), payload=Span(256, 10, 3))
    assert receiver.decode(first) == Packet(SESSION, 1, Say("one"), 0, Span(256, 10, 3))
    sender.next_number += 1
    assert receiver.decode(sender.encode(Say("two"))).number == 2


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (raw(Say(), session=SESSION + 1), f"of session {SESSION + 1:x}, not of {SESSION:x}"),
        (raw(Say(), number=2), "packet 2 came where 1 was expected"),
        (raw(Say(), answers=1), "an answer to packet 1, which was never sent"),
        (raw(Heard()), "'Heard'"),
        (raw(Say())[:-1], "truncated"),
        (raw(Say()) + b"\0", "trailing"),
        (b"", "truncated"),
        (raw(Say(), payload=Span(0, 0, 1)), ">= 1"),
        (raw(Say(), payload=Span(-1, 5, 1)), ">= 0"),
        (raw(Say(), payload=Span(1 << 62, 5, 1)), "4611686018427387903"),
        (b"\x93\x01\x01\x94\xa6Listed\xdd\xff\xff\xff\xff", "truncated"),  # 4 billion numbers
        (b"\x91" * MAX_PACKET_BYTES, "Expected"),
        (bytes(MAX_PACKET_BYTES + 1), f"at most {MAX_PACKET_BYTES}"),
    ],
)
def test_what_is_no_packet_of_ours_is_refused_in_words(packet: bytes, words: str) -> None:
    with pytest.raises(WireError) as caught:
        coder().decode(packet)
    assert words in str(caught.value)


def test_the_same_packet_is_not_taken_twice() -> None:
    receiver = coder()
    receiver.decode(raw(Say()))
    with pytest.raises(WireError, match="packet 1 came where 2 was expected"):
        receiver.decode(raw(Say()))


def test_a_message_that_no_packet_holds_is_not_sent() -> None:
    with pytest.raises(ValueError, match=f"a packet ends at {MAX_PACKET_BYTES}"):
        coder().encode(Say("x" * MAX_PACKET_BYTES))


def test_what_a_peer_sent_is_not_all_repeated() -> None:
    with pytest.raises(WireError) as caught:
        coder().decode(msgspec.msgpack.encode([SESSION, 1, ["x" * 50_000]]))
    assert len(str(caught.value)) < 300


WHOLE = raw(Listed([1, 2, 3], b"abc", {"a": "b"}), payload=Span(256, 40_960, 1))


@given(st.data())
def test_damaged_bytes_are_a_packet_or_refused_and_take_little_memory(data: st.DataObject) -> None:
    packet = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(packet) - 1))
        packet[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=5))
        if not packet:
            break
    receiver = coder()
    tracemalloc.start()
    try:
        receiver.decode(bytes(packet))
    except WireError as error:
        assert str(error)
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(content: bytes) -> None:
    with pytest.raises(WireError):
        coder().decode(content)
