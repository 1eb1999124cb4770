"""Parts from which both ends of a local channel are built, and how a child inherits its parts.

Owns the names and numbers that a child inherits. Does not know processes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from luceasync.errors import ConfigError
from luceasync.ipc.heartbeat import CompletionSender, HeartbeatResponder
from luceasync.ipc.local import LocalChannel
from luceasync.ipc.memory import SealedMemory, require_linux
from luceasync.ipc.packets import Codec, Message, Natural, Positive
from luceasync.ipc.shared import PayloadInbox, PayloadOutbox, SharedInbox, SharedOutbox, lay_out
from luceasync.ipc.stream import StreamInbox, StreamOutbox

VARIABLE = "LUCEASYNC_WIRING"
TRANSPORTS = ("auto", "shared", "stream")


class Rings:
    """Memory with a ring for each end that writes."""

    def __init__(self, memory: SealedMemory, ring_bytes: Sequence[int]) -> None:
        self.memory = memory
        self.ring_bytes = tuple(ring_bytes)
        self.regions = lay_out(ring_bytes)[1]

    @classmethod
    def create(cls, ring_bytes: Sequence[int]) -> Rings:
        """New rings. Raises OSError if the system shares no memory."""
        return cls(SealedMemory.create("luceasync-rings", lay_out(ring_bytes)[0]), ring_bytes)

    @classmethod
    def inherit(cls, fd: int, ring_bytes: Sequence[int]) -> Rings:
        """Rings created by another process. Raises ChannelClosed if they differ from what was
        announced."""
        return cls(SealedMemory.inherit(fd, lay_out(ring_bytes)[0]), ring_bytes)

    def close(self) -> None:
        """Close them, after the channels that use them. Idempotent."""
        self.memory.close()


def open_rings(transport: str, ring_bytes: Sequence[int]) -> Rings | None:
    """Rings for `--ipc-transport`; None if payloads are sent as bytes. Raises ConfigError if memory
    must be shared and cannot be."""
    if transport not in TRANSPORTS:
        allowed = "|".join(TRANSPORTS)
        raise ConfigError(f"--ipc-transport {transport}: it must be {allowed}")
    require_linux()
    if transport == "stream":
        return None
    try:
        return Rings.create(ring_bytes)
    except OSError as error:
        if transport == "auto":
            return None
        raise ConfigError(
            f"--ipc-transport shared: no memory of {sum(ring_bytes)} bytes can be shared "
            f"({error.strerror}); auto and stream need none"
        ) from None


class Wiring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of the descriptors that a child inherits, and what they are.

    The child answers heartbeats at `pulse`, and completes tickets at `completions`; -1: it need
    not. `rings` is -1 if payloads go through `stream`. `written` and `read` are the rings that the
    child writes and reads, `ring_bytes` the sizes of all, or of those in its own memory.
    """

    session: Positive
    control: Natural
    ring_bytes: tuple[Natural, ...]
    written: Natural
    read: Natural
    pulse: int = -1
    completions: int = -1
    stream: int = -1
    rings: int = -1
    lent: dict[str, tuple[Natural, Positive]] = {}


def boxes(
    wiring: Wiring, rings: Rings | None, stream: socket.socket | None, *, is_child: bool
) -> tuple[PayloadOutbox, PayloadInbox]:
    """The payload boxes of one end; those of the other end are the same, reversed."""
    written, read = wiring.written, wiring.read
    if not is_child:
        written, read = read, written
    first = wiring.session  # payloads of other sessions have other numbers
    if rings is not None:
        return (
            SharedOutbox(rings.memory, rings.regions[written], first),
            SharedInbox(rings.memory, rings.regions[read], first, is_lent=is_child),
        )
    assert stream is not None
    stream.setblocking(False)
    return (
        StreamOutbox(stream, wiring.ring_bytes[written], first),
        StreamInbox(stream.dup(), wiring.ring_bytes[read], first),
    )


@dataclass(frozen=True)
class ParentConnection:
    """A child's connection to its parent: the channel, and memory that the parent lent, by name."""

    channel: LocalChannel[Any]
    lent: Mapping[str, SealedMemory] = field(default_factory=dict)
    rings: Rings | None = None
    responder: HeartbeatResponder | None = None
    completions: CompletionSender | None = None

    def close(self) -> None:
        """Idempotent."""
        self.channel.close()
        if self.responder is not None:
            self.responder.close()
        if self.completions is not None:
            self.completions.close()
        for memory in self.lent.values():
            memory.close()
        if self.rings is not None:
            self.rings.close()


def connect_to_parent(
    messages: Sequence[type[Message]], environ: MutableMapping[str, str] = os.environ
) -> ParentConnection:
    """Open this process's end of the channel to its parent; `messages` are what may come.

    Removes the wiring from the environment: grandchildren must not use it. Raises ConfigError if
    there is none, and ChannelClosed for memory that differs from what was announced.
    """
    require_linux()
    wiring_json = environ.pop(VARIABLE, None)
    if wiring_json is None:
        raise ConfigError(f"this program is started by luceasync, which sets {VARIABLE}")
    try:
        wiring = msgspec.json.decode(wiring_json, type=Wiring)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from None
    responder = None if wiring.pulse < 0 else HeartbeatResponder(_inherited(wiring.pulse))
    completions = (
        None if wiring.completions < 0 else CompletionSender(_inherited(wiring.completions))
    )
    rings = None if wiring.rings < 0 else Rings.inherit(wiring.rings, wiring.ring_bytes)
    lent = {
        name: SealedMemory.inherit(fd, num_bytes, populate=False)
        for name, (fd, num_bytes) in wiring.lent.items()
    }
    stream = None if wiring.stream < 0 else _inherited(wiring.stream)
    control = _inherited(wiring.control)
    outbox, inbox = boxes(wiring, rings, stream, is_child=True)
    channel = LocalChannel[Any](
        control, Codec(wiring.session, messages), outbox, inbox, "the process that started this one"
    )
    return ParentConnection(channel, lent, rings, responder, completions)


def _inherited(fd: int) -> socket.socket:
    """An inherited socket, which children of this process do not inherit."""
    found = socket.socket(fileno=fd)
    found.set_inheritable(False)
    return found
