"""Both ends of a local channel in one process, and messages for them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from luceasync.ipc.local import LocalChannel
from luceasync.ipc.packets import Codec, Message, PayloadSpan
from luceasync.ipc.wiring import Rings, Wiring, boxes

SESSION = 7_000
RING_BYTES = (1 << 16, 1 << 16, 1 << 16)  # the third one is another group's
DEADLINE_S = 5.0
SOON_S = 0.05  # for deadlines that pass


class Say(Message, frozen=True):
    words: str = ""


class Heard(Message, frozen=True):
    num_words: int = 0


def packet(
    message: object,
    number: int = 1,
    *,
    session: int = SESSION,
    answers: int = 0,
    payload: PayloadSpan | None = None,
) -> bytes:
    """What a sender of anything could send."""
    told = (0, 0, 0) if payload is None else msgspec.structs.astuple(payload)
    body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    words = (session, number, answers, *told)
    return b"".join((each % 2**64).to_bytes(8, sys.byteorder) for each in words) + body


@dataclass
class Ends:
    """`there` is the started process's end; the sockets of its side are at hand for mischief."""

    here: LocalChannel[Any]
    there: LocalChannel[Any]
    control_there: socket.socket
    stream_there: socket.socket | None
    rings: Rings | None
    rings_there: Rings | None

    def close(self) -> None:
        for channel in (self.here, self.there):
            channel.close()
        for rings in (self.rings, self.rings_there):
            if rings is not None:
                rings.close()


def make_ends(
    transport: str,
    died_fd: int = -1,
    ring_bytes: tuple[int, ...] = RING_BYTES,
    messages: Sequence[type[Message]] = (),
) -> Ends:
    """`messages`: what may be said besides Heard and Say."""
    wiring = Wiring(session=SESSION, control=0, ring_bytes=ring_bytes, written=1, read=0)
    control, control_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    streams: tuple[socket.socket | None, socket.socket | None] = (None, None)
    rings = rings_there = None
    if transport == "stream":
        streams = socket.socketpair()
    else:
        rings = Rings.create(ring_bytes)
        rings_there = Rings.inherit(os.dup(rings.memory.fd), ring_bytes)
    here = LocalChannel[Any](
        control,
        Codec(SESSION, (Heard, Say, *messages)),
        *boxes(wiring, rings, streams[0], is_child=False),
        "the child",
        died_fd,
    )
    there = LocalChannel[Any](
        control_there,
        Codec(SESSION, (Heard, Say, *messages)),
        *boxes(wiring, rings_there, streams[1], is_child=True),
        "the parent",
    )
    return Ends(here, there, control_there, streams[1], rings, rings_there)


def send_bytes(channel: LocalChannel[Any], content: bytes, answers: int = 0) -> int:
    """Say with this payload."""
    room = channel.reserve(len(content), DEADLINE_S)
    room.view[:] = content
    return channel.send(Say(), room, answers=answers, deadline_s=DEADLINE_S)


def take_bytes(channel: LocalChannel[Any], num_bytes: int) -> bytes:
    """The payload of the next message."""
    payload = channel.receive(DEADLINE_S).payload
    assert payload is not None
    target = bytearray(num_bytes)
    payload.into(memoryview(target))
    return bytes(target)
