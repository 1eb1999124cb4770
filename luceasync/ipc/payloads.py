"""How a channel of one machine moves payloads: what its bodies, shared and stream, have in common.

Knows no packets but the span that stands in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

from luceasync.ipc.channel import Outgoing, Payload
from luceasync.ipc.memory import Register
from luceasync.ipc.packets import Span
from luceasync.ipc.ring import Place


class Room(NamedTuple):
    """An `Outgoing`: its place in the ring, and the bytes there."""

    place: Place
    view: memoryview


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a payload needs of its channel.

    `fail` closes it with words and raises ChannelClosed; `wait` sleeps until a descriptor can be
    read, or fails.
    """

    fail: Callable[[str], NoReturn]
    wait: Callable[[int], None]


class Told(Protocol):
    """What a packet says of a payload; see Span."""

    @property
    def begin(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def sequence(self) -> int: ...


class Outbox(Protocol):
    """Payloads on their way out."""

    @property
    def fd(self) -> int:
        """What becomes writable when push() may go on; -1: push() never stops."""

    def reserve(self, num_bytes: int) -> Outgoing | None:
        """Room, or None until more has been read. Raises ValueError, WireError."""

    def commit(self, room: Outgoing) -> Told:
        """What the packet says of it; its bytes are final."""

    def refer(self, payload: Payload) -> Span | None:
        """What a packet says of a payload that the other end can reach where it lies, if so."""

    def push(self) -> bool:
        """Send what has been committed, as far as it goes now; whether all has gone. Raises
        OSError.
        """

    def register(self, register: Register) -> None: ...

    def close(self) -> None: ...


class Inbox(Protocol):
    """Payloads on their way in."""

    def accept(self, begin: int, num_bytes: int, sequence: int, hooks: Hooks) -> Payload:
        """The payload that a packet speaks of. Raises WireError for one that cannot be."""

    def pull(self) -> None:
        """Take in what is there without waiting, so that the other end can go on sending. Raises
        WireError, OSError.
        """

    @property
    def fd(self) -> int:
        """What becomes readable when pull() may go on; -1: it never has anything to do."""

    def register(self, register: Register) -> None: ...

    def close(self) -> None: ...
