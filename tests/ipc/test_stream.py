"""Payloads that come as bytes: in order, bounded, and complete."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from luceasync.errors import ChannelClosed
from luceasync.ipc.packets import PayloadSpan
from tests.ipc.ends import (
    DEADLINE_S,
    RING_BYTES,
    SESSION,
    Ends,
    Say,
    make_ends,
    packet,
    send_bytes,
    take_bytes,
)


def tell(ends: Ends, span: PayloadSpan, number: int = 1) -> None:
    ends.control_there.send(packet(Say(), number, payload=span))


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (PayloadSpan(0, RING_BYTES[1], SESSION), "bytes; at most 65280 may come"),
        (PayloadSpan(0, 1 << 61, SESSION), "at most 65280 may come"),
        (PayloadSpan(0, 10, SESSION + 1), f"payload {SESSION + 1}; {SESSION} was expected"),
        (PayloadSpan(256, 10, SESSION), "at 256, where payloads come as bytes"),
    ],
)
def test_a_payload_that_cannot_come_closes_the_channel(
    stream_ends: Ends, span: PayloadSpan, words: str
) -> None:
    tell(stream_ends, span)
    with pytest.raises(ChannelClosed, match=words):
        stream_ends.here.receive(DEADLINE_S)


def test_half_a_payload_closes_the_channel(stream_ends: Ends) -> None:
    assert stream_ends.stream_there is not None
    tell(stream_ends, PayloadSpan(0, 10, SESSION))
    stream_ends.stream_there.send(b"12345")
    payload = stream_ends.here.receive(DEADLINE_S).payload
    assert payload is not None
    stream_ends.there.close()
    with pytest.raises(ChannelClosed, match="ended after 5 of 10 bytes"):
        payload.into(memoryview(bytearray(10)))


def test_bytes_that_never_come_are_not_waited_for(
    stream_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luceasync.ipc.local.PAYLOAD_WAIT_S", 0.05)
    tell(stream_ends, PayloadSpan(0, 10, SESSION))
    payload = stream_ends.here.receive(DEADLINE_S).payload
    assert payload is not None
    with pytest.raises(ChannelClosed, match=r"no byte of a payload for 0\.05 s"):
        payload.view(10)


def test_payloads_that_are_kept_beyond_the_ring_are_an_error_and_no_hang(
    stream_ends: Ends,
) -> None:
    for _ in range(3):
        send_bytes(stream_ends.there, bytes(30_000))
    kept = [stream_ends.here.receive(DEADLINE_S).payload for _ in range(3)]
    with pytest.raises(ChannelClosed, match="none of which is freed"):
        for payload in kept:
            assert payload is not None
            payload.view(30_000)


def test_both_may_write_more_than_a_socket_holds_before_they_read() -> None:
    ends = make_ends("stream", ring_bytes=(1 << 20, 1 << 20))
    content = os.urandom(60_000)

    def write_then_read(channel) -> list[bytes]:
        for _ in range(10):
            send_bytes(channel, content)
        return [take_bytes(channel, len(content)) for _ in range(10)]

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(write_then_read, ends.there)
        assert write_then_read(ends.here) == [content] * 10
        assert there.result() == [content] * 10
    ends.close()


def test_a_payload_can_be_forwarded() -> None:
    first, second = make_ends("stream"), make_ends("stream")
    send_bytes(first.there, b"from a child")
    got = first.here.receive(DEADLINE_S)
    assert got.payload is not None
    second.here.forward(Say(), got.payload, deadline_s=DEADLINE_S)
    passed = second.there.receive(DEADLINE_S).payload
    assert passed is not None
    assert bytes(passed.view(12)) == b"from a child"
    got.payload.free()
    first.close()
    second.close()
