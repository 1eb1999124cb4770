"""What goes over a channel: one msgspec struct a packet, checked before anybody believes it.

Owns the bounds of a packet, its session and its order. Knows no socket, nor what messages mean:
who uses a channel subclasses `Message`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar, Union

import msgspec

from luceasync.cyext.packets import PacketCodec

M = TypeVar("M")

MAX_PACKET_BYTES = 64 << 10
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class WireError(Exception):
    """Why a channel closes, in words: what came and may not come, or what did not come."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """What one end tells the other. A subclass adds fields; its name is its tag on the wire."""


class Ping(Message, frozen=True):
    """Are you there? The channel itself answers it."""


class Pong(Message, frozen=True):
    """Yes."""


class Hello(Message, frozen=True):
    """The first packet of who calls. Its shape, and that of `Packet`, is the same in every
    protocol: else no end could say in words that the other one has another protocol.
    """

    protocol: Natural
    version: str
    states: dict[str, str]


class Welcome(Message, frozen=True):
    """The answer of who agrees, with what it states itself."""

    protocol: Natural
    version: str
    states: dict[str, str]


class Refused(Message, frozen=True):
    """The answer of who does not: what differs, with both values."""

    words: str


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a payload lies: bytes `[begin, begin + num_bytes)` of what both ends share (0: it comes
    as bytes), and the number that stands beside it while it is the payload that is meant.
    """

    begin: Natural
    num_bytes: Positive
    sequence: Positive


class Packet(msgspec.Struct, Generic[M], frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message with what the channel itself reads. `number` counts the sender's packets from 1;
    `answers` is the number of the packet that this one answers, or 0.
    """

    session: Natural
    number: Positive
    body: M
    answers: Natural = 0
    payload: Span | None = None


OWN_MESSAGES = (Ping, Pong, Hello, Welcome, Refused)


class Codec(PacketCodec):
    """Packets of one session as bytes and back, in order."""

    def __init__(self, session: int, messages: Sequence[type[Message]] = ()) -> None:
        """`messages`: what the other end may say besides OWN_MESSAGES."""
        union: Any = Union[(*OWN_MESSAGES, *messages)]
        super().__init__(
            session,
            Packet,
            msgspec.msgpack.Encoder().encode,
            msgspec.msgpack.Decoder(Packet[union]).decode,
            MAX_PACKET_BYTES,
            WireError,
            UNREADABLE,
        )
