"""The packets of a channel: a header and one msgspec struct each, validated when they are decoded.

Owns the limits of a packet, and the messages of the channel itself. Does not know sockets. Users of
a channel subclass `Message`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Union

import msgspec

from luceasync.cyext.packets import PacketCodec

MAX_PACKET_BYTES = 64 << 10
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class WireError(Exception):
    """Why a channel closes: something arrived that is not allowed, or did not arrive."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A message to the other end. A subclass adds fields; its name is its tag on the wire."""


class Ping(Message, frozen=True):
    """A request for a sign of life. The channel itself answers it."""


class Pong(Message, frozen=True):
    """The answer to Ping."""


class Hello(Message, frozen=True):
    """The first packet of the parent. Its shape, and that of a packet's header, must never change:
    otherwise an end could not tell a peer with another protocol why it refuses it."""

    protocol: Natural
    version: str
    states: dict[str, str]


class Welcome(Message, frozen=True):
    """The answer of a process that agrees, with its own statement."""

    protocol: Natural
    version: str
    states: dict[str, str]


class Refused(Message, frozen=True):
    """The answer of a process that does not agree: the difference, with both values."""

    words: str


class PayloadSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a payload lies: bytes `[begin, begin + num_bytes)` of shared memory (`begin` 0: it is
    sent as bytes), and the sequence number that precedes it there while it is valid."""

    begin: Natural
    num_bytes: Positive
    sequence: Positive


OWN_MESSAGES = (Ping, Pong, Hello, Welcome, Refused)


class Codec(PacketCodec):
    """Encodes and decodes the packets of one session, in order. Each has its sender's count, from 1
    on, the number of the packet that it answers, or 0, and the span of its payload, if any."""

    def __init__(self, session: int, messages: Sequence[type[Message]] = ()) -> None:
        """`messages`: types that the other end may send besides OWN_MESSAGES."""
        union: Any = Union[(*OWN_MESSAGES, *messages)]
        super().__init__(
            session,
            msgspec.msgpack.Encoder().encode_into,
            msgspec.msgpack.Decoder(union).decode,
            PayloadSpan,
            MAX_PACKET_BYTES,
            WireError,
            UNREADABLE,
        )
