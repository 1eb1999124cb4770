"""A channel between two processes, and the launcher of the process at its other end.

Protocols, and the greeting, which decides whether two processes belong together. An implementation
may reach another machine: no path, descriptor or device name in a protocol has a meaning beyond its
host, and a caller that reserves room or receives a payload does not learn where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from luceasync import __version__
from luceasync.cyext.packets import Received, Traffic
from luceasync.errors import PeerMismatch
from luceasync.ipc.memory import Register
from luceasync.ipc.packets import Hello, Message, PayloadSpan, Refused, Welcome

__all__ = [
    "Channel",
    "Launcher",
    "OutgoingPayload",
    "Payload",
    "ProcessVitals",
    "Received",
    "StartedProcess",
    "Traffic",
]

M = TypeVar("M")
A = TypeVar("A", bound=Message)


class OutgoingPayload(Protocol):
    """Room for a payload of exactly the requested number of bytes; fill it, then send it."""

    @property
    def view(self) -> memoryview: ...


class Payload(Protocol):
    """Bytes that came with a message, in memory that the channel reuses.

    Callers pass the size that they have computed themselves. If it differs from the sender's, the
    channel closes, and nothing is allocated or written. All methods raise ChannelClosed.
    """

    @property
    def num_bytes(self) -> int:
        """The size stated by the sender."""

    def view(self, num_bytes: int) -> memoryview:
        """The bytes in place, valid until free()."""

    def into(self, target: memoryview) -> None:
        """Copy all bytes to memory of exactly that size, then free()."""

    def lend(self, memory: object) -> PayloadSpan | None:
        """The place of the bytes, for a process that also maps `memory`; None: they are not in
        it."""

    def free(self) -> None:
        """The sender may reuse the memory. Idempotent."""


class Channel(Protocol[M]):
    """Messages to and from one other process, in order, each with or without a payload.

    Used by one thread. Every wait has a deadline. At the deadline, or when the other end dies, the
    channel closes, and all methods raise ChannelClosed from then on.
    """

    @property
    def traffic(self) -> Traffic: ...

    @property
    def closed(self) -> str | None:
        """Why the channel is closed, or None while it is open."""

    def register(self, register: Register) -> None:
        """Have a device register the memory of payloads, until close()."""

    def keep_awake(self) -> None:
        """Spin from one step to the next while they follow each other closely, if cores are spare.
        For processes that compute on devices; others spin briefly."""

    def reserve(self, num_bytes: int, deadline_s: float) -> OutgoingPayload:
        """Room for a payload; waits while the other end still reads earlier ones.

        Raises ValueError for more than the channel ever holds. Send rooms in the order in which
        they were reserved.
        """

    def send(
        self,
        message: Message,
        payload: OutgoingPayload | None = None,
        *,
        answers: int = 0,
        deadline_s: float,
    ) -> int:
        """Returns the number of the packet, to which an answer refers."""

    def forward(
        self, message: Message, payload: Payload, *, answers: int = 0, deadline_s: float
    ) -> int:
        """Send with a payload that was received on another channel, by reference if both share
        memory.

        Free the payload when the other end has answered, not before.
        """

    def receive(self, deadline_s: float) -> Received[M]:
        """The next message."""

    def poll(self, timeout_s: float) -> bool:
        """Whether a message has arrived, waiting up to `timeout_s`; a timeout does not close the
        channel."""

    def answer(self, number: int, kind: type[A], deadline_s: float) -> Received[A]:
        """Wait for the answer to packet `number`; messages that arrive before it are kept for
        receive(). An answer of another kind closes the channel."""

    def call(
        self,
        message: Message,
        kind: type[A],
        payload: OutgoingPayload | None = None,
        *,
        deadline_s: float,
    ) -> Received[A]:
        """Send the message, and wait for the answer, both within the deadline."""

    def ping(self, deadline_s: float) -> None:
        """Ping the other end, which replies whenever it waits for messages."""

    def close(self, words: str = "closed here") -> None:
        """Close the channel; the other end notices. Idempotent."""


class ProcessVitals(NamedTuple):
    """How long ago a process last answered the heartbeat (None: never so far), and its memory,
    including pages shared with others."""

    age_s: float | None
    resident_bytes: int


class StartedProcess(Protocol[M]):
    """A process that was started, and the channel to it. A process that does not answer the
    heartbeat for too long is killed, whatever it is doing; its channel then closes as at any death.
    """

    @property
    def channel(self) -> Channel[M]: ...

    @property
    def is_well(self) -> bool:
        """Whether the process lives and does not hang, as far as is known. May be called from any
        thread."""

    @property
    def vitals(self) -> ProcessVitals:
        """May be called from any thread."""

    def is_alive(self) -> bool: ...

    def expect(self, number: int, call: Callable[[bool], None]) -> None:
        """Call `call` once, in any thread: with True when the process completes `number`, outside
        its channel, and with False if it ends before. The call must not block."""

    def last_words(self) -> str:
        """How the process ended, if it has, and its last log lines."""

    def end(self, grace_s: float, deadline_s: float) -> None:
        """Close the channel, give the process `grace_s` to end by itself, then kill and reap it.
        Idempotent. Raises LuceasyncError if it does not end within `deadline_s`.
        """


class Launcher(Protocol):
    """Starts the process at the other end of a channel."""

    def launch(
        self, arguments: Sequence[str], messages: Sequence[type[Message]]
    ) -> StartedProcess[Any]:
        """Start a process with these arguments; `messages` are the types that it may send. Greet it
        before anything else. Raises ConfigError if there is nothing to start."""

    def close(self) -> None:
        """End the processes that were started and still run, and free the launcher's resources."""


PROTOCOL = 4  # increase it with every change of a message's meaning


@dataclass(frozen=True, slots=True)
class Statement:
    """What one end states in the greeting. `states`: values that must be equal on both ends, by
    name: a digest of weights, a dtype, layers."""

    states: Mapping[str, str] = field(default_factory=dict)
    protocol: int = PROTOCOL
    version: str = __version__


def difference(ours: Statement, theirs: Statement) -> str | None:
    """The first difference between two ends, with both values; None if they agree."""
    if ours.protocol != theirs.protocol:
        return f"protocol {ours.protocol} here, {theirs.protocol} there"
    if ours.version != theirs.version:
        return f"luceasync {ours.version} here, {theirs.version} there"
    for name in sorted({*ours.states, *theirs.states}):
        here, there = (each.states.get(name, "not stated") for each in (ours, theirs))
        if here != there:
            return f"{name}: {here} here, {there} there"
    return None


def greet(channel: Channel[Any], statement: Statement, deadline_s: float) -> None:
    """Greet a process that was started. Raises PeerMismatch if either end refuses the other, and
    ChannelClosed; the channel is closed then.
    """
    states = dict(statement.states)
    hello = Hello(statement.protocol, statement.version, states)
    got = channel.call(hello, Message, deadline_s=deadline_s).message
    match got:
        case Welcome(protocol, version, states):
            _check(channel, statement, Statement(states, protocol, version))
        case Refused(words):
            _refuse(channel, f"it refused us: {words}")
        case _:
            _refuse(channel, f"it answered a greeting with {type(got).__name__}")


def be_greeted(channel: Channel[Any], statement: Statement, deadline_s: float) -> None:
    """Wait for the greeting, and answer it. Raises as greet() does."""
    got = channel.receive(deadline_s)
    if not isinstance(got.message, Hello):
        _refuse(channel, f"it began with {type(got.message).__name__}, not with a greeting")
    theirs = Statement(got.message.states, got.message.protocol, got.message.version)
    words = difference(statement, theirs)
    if words is not None:
        channel.send(Refused(words), answers=got.number, deadline_s=deadline_s)
        _refuse(channel, words)
    answer = Welcome(statement.protocol, statement.version, dict(statement.states))
    channel.send(answer, answers=got.number, deadline_s=deadline_s)


def _check(channel: Channel[Any], ours: Statement, theirs: Statement) -> None:
    words = difference(ours, theirs)
    if words is not None:
        _refuse(channel, words)


def _refuse(channel: Channel[Any], words: str) -> None:
    channel.close(words)
    raise PeerMismatch(channel.closed)
