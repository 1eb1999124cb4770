"""A packet is the next one of its session, or is refused with the reason."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.ipc.packets import MAX_PACKET_BYTES, Codec, Message, PayloadSpan, WireError
from tests.ipc.ends import SESSION, Heard, Say, packet


class Listed(Message, frozen=True):
    numbers: list[int]
    content: bytes
    named: dict[str, str]


def coder() -> Codec:
    return Codec(SESSION, (Say, Listed))


def test_what_is_sent_comes_back_the_same() -> None:
    sender, receiver = coder(), coder()
    first = sender.encode(Say("one"), payload=PayloadSpan(256, 10, 3))
    assert first == packet(Say("one"), payload=PayloadSpan(256, 10, 3))
    assert receiver.decode(first) == (Say("one"), 1, 0, PayloadSpan(256, 10, 3))
    receiver.encode(Say())
    assert receiver.decode(sender.encode(Say("two"), 1)) == (Say("two"), 2, 1, None)


@pytest.mark.parametrize(
    ("came", "words"),
    [
        (packet(Say(), session=SESSION + 1), f"of session {SESSION + 1:x}; this is {SESSION:x}"),
        (packet(Say(), number=2), "packet 2 arrived; 1 was expected"),
        (packet(Say(), answers=1), "an answer to packet 1, which was never sent"),
        (packet(Heard()), "'Heard'"),
        (packet(Say())[:-1], "truncated"),
        (packet(Say()) + b"\0", "trailing"),
        (b"", "truncated"),
        (packet(Say())[:40], "truncated"),
        (packet(Say(), payload=PayloadSpan(0, 0, 1)), "a malformed payload: 0 bytes"),
        (packet(Say(), payload=PayloadSpan(256, 5, 0)), "a malformed payload"),
        (packet(Say(), payload=PayloadSpan(-1, 5, 1)), "a malformed payload"),
        (packet(Say(), payload=PayloadSpan(1 << 62, 5, 1)), "a malformed payload"),
        (packet(Say(), payload=PayloadSpan(256, 1 << 62, 1)), "a malformed payload"),
        (packet(b"\x94\xa6Listed\xdd\xff\xff\xff\xff"), "truncated"),  # 4 billion numbers
        (packet(b"\x91" * (MAX_PACKET_BYTES - 48)), "Expected"),
        (bytes(MAX_PACKET_BYTES + 1), f"the limit is {MAX_PACKET_BYTES}"),
    ],
)
def test_what_is_no_packet_of_ours_is_refused_in_words(came: bytes, words: str) -> None:
    with pytest.raises(WireError) as caught:
        coder().decode(came)
    assert words in str(caught.value)


def test_a_message_is_what_its_bytes_say_whatever_came_before() -> None:
    sender, receiver = coder(), coder()
    for words in ("a", "a", "b", "", "a" * 100, "a" * 100, "b", "a"):
        assert receiver.decode(sender.encode(Say(words)))[0] == Say(words)


def test_the_same_packet_is_not_taken_twice() -> None:
    receiver = coder()
    receiver.decode(packet(Say()))
    with pytest.raises(WireError, match="packet 1 arrived; 2 was expected"):
        receiver.decode(packet(Say()))


def test_a_message_that_no_packet_holds_is_not_sent() -> None:
    with pytest.raises(ValueError, match=f"a packet holds at most {MAX_PACKET_BYTES}"):
        coder().encode(Say("x" * MAX_PACKET_BYTES))


def test_what_a_peer_sent_is_not_all_repeated() -> None:
    with pytest.raises(WireError) as caught:
        coder().decode(packet(["x" * 50_000]))
    assert len(str(caught.value)) < 300


WHOLE = packet(Listed([1, 2, 3], b"abc", {"a": "b"}), payload=PayloadSpan(256, 40_960, 1))


@given(st.data())
def test_damaged_bytes_are_a_packet_or_refused_and_take_little_memory(data: st.DataObject) -> None:
    came = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(came) - 1))
        came[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=5))
        if not came:
            break
    receiver = coder()
    tracemalloc.start()
    try:
        receiver.decode(bytes(came))
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
