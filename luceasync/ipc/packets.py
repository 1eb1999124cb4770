"""What goes over a channel: a header and one msgspec struct a packet, checked before anybody
believes it.

Owns the bounds of a packet and what both ends say. Knows no socket, nor what messages mean: who
uses a channel subclasses `Message`.
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
    """Why a channel closes, in words: what came and may not come, or what did not come."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """What one end tells the other. A subclass adds fields; its name is its tag on the wire."""


class Ping(Message, frozen=True):
    """Are you there? The channel itself answers it."""


class Pong(Message, frozen=True):
    """Yes."""


class Hello(Message, frozen=True):
    """The first packet of who calls. Its shape, and that of a packet's header, is the same in every
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


OWN_MESSAGES = (Ping, Pong, Hello, Welcome, Refused)


class Codec(PacketCodec):
    """Packets of one session as bytes and back, in order. Each counts its sender's from 1, and
    names the one of ours that it answers, or 0, and the payload that it comes with, if any.
    """

    def __init__(self, session: int, messages: Sequence[type[Message]] = ()) -> None:
        """`messages`: what the other end may say besides OWN_MESSAGES."""
        union: Any = Union[(*OWN_MESSAGES, *messages)]
        super().__init__(
            session,
            msgspec.msgpack.Encoder().encode_into,
            msgspec.msgpack.Decoder(union).decode,
            Span,
            MAX_PACKET_BYTES,
            WireError,
            UNREADABLE,
        )
