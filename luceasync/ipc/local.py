"""A channel on one machine: a SEQPACKET socket for packets, and an outbox and inbox for payloads.

Owns the sockets and every wait. Knows no process; its end is seen by `died_fd` and by the socket.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from luceasync.cyext.packets import QuickChannel
from luceasync.errors import ChannelClosed
from luceasync.ipc.channel import Outgoing, Payload, Received
from luceasync.ipc.memory import Register
from luceasync.ipc.packet_socket import PacketSocket
from luceasync.ipc.packets import Codec, Message, Ping, Pong, WireError
from luceasync.ipc.payloads import Hooks, Inbox, Outbox, Told
from luceasync.ipc.readiness import Readiness
from luceasync.ipc.waiting import Deadline, Patience

M = TypeVar("M")
A = TypeVar("A", bound=Message)
T = TypeVar("T")

MAX_ASIDE = 1024  # messages that nobody has asked for yet
FULL_RING_MS = 1  # how often a full ring is looked at: nothing wakes who waits for it
IDLE_S = 0.05  # without a message; from then on nothing is done until one comes
NOW = Deadline(0)
ENDS = (WireError, OSError)  # of a channel


class LocalChannel(QuickChannel[M]):
    """See `luceasync.ipc.channel.Channel`. Call it from one thread. What the other end is quick to
    take or to answer is not done here, but compiled.
    """

    def __init__(
        self,
        control: socket.socket,
        codec: Codec,
        outbox: Outbox,
        inbox: Inbox,
        peer: str,
        died_fd: int = -1,
    ) -> None:
        """Takes over the socket and both boxes. `peer`: the other end in errors; `died_fd`: what
        becomes readable when its process ends.
        """
        hooks = Hooks(self.fail, self._wait_for_bytes)
        self._packets = PacketSocket(control, codec, Patience.brief(), inbox, hooks)
        super().__init__(self._packets, outbox, deque(), ChannelClosed, ENDS)
        self._outbox = outbox
        self._inbox = inbox
        self._peer = peer
        self._readiness = Readiness(self._packets.fd, died_fd)

    def register(self, register: Register) -> None:
        self._outbox.register(register)
        self._inbox.register(register)

    def keep_awake(self) -> None:
        self._packets.patience = Patience.from_step_to_step()

    def forward(
        self, message: Message, payload: Payload, *, answers: int = 0, deadline_s: float
    ) -> int:
        if self.closed is not None:
            raise ChannelClosed(self.closed)
        try:
            span = self._outbox.refer(payload)
            if span is not None:
                self.traffic.payload_bytes_lent += span.num_bytes
                number = self._packets.send(message, answers, span)
                return self.send_on(message, span, answers, deadline_s, number, True)
        except ENDS as error:
            self.fail(str(error))
        room = self.reserve(payload.num_bytes, deadline_s)
        room.view[:] = payload.view(payload.num_bytes)
        return self.send(message, room, answers=answers, deadline_s=deadline_s)

    def poll(self, timeout_s: float) -> bool:
        if self.closed is not None:
            raise ChannelClosed(self.closed)
        try:
            got = None if self._came else self._wait(Deadline(timeout_s))
        except ENDS as error:
            self.fail(str(error))
        if got is not None:
            self._came.append(got)
        return bool(self._came)

    def ping(self, deadline_s: float) -> None:
        self.call(Ping(), Pong, deadline_s=deadline_s)

    def close(self, words: str = "closed here") -> None:
        if self.closed is None:
            self.closed = f"{self._peer}: {words}"
            self._came.clear()
            self._packets.close()
            self._outbox.close()
            self._inbox.close()

    def reserve_later(self, num_bytes: int, deadline_s: float) -> Outgoing:
        """Room in a ring that is full."""
        deadline = Deadline(deadline_s)
        return self._until(lambda: self._outbox.reserve(num_bytes), -1, deadline, "to read")

    def send_on(
        self,
        message: Message,
        span: Told | None,
        answers: int,
        deadline_s: float,
        number: int | None,
        is_pushed: bool,
    ) -> int:
        """What a socket that is full did not take: the packet, if it has no number, and bytes."""
        packets, push, deadline = self._packets, self._outbox.push, Deadline(deadline_s)
        if number is None:
            what = f"to take {type(message).__name__}"
            number = self._until(
                lambda: packets.send(message, answers, span), packets.fd, deadline, what
            )
        if not is_pushed:
            what = f"to take the payload of {type(message).__name__}"
            self._until(lambda: push() or None, self._outbox.fd, deadline, what)
        packets.answer_pings()
        return number

    def answer_later(self, number: int, kind: type[A], deadline_s: float) -> Received[A]:
        """The answer to packet `number`, which has come before or is not the next message."""
        deadline = Deadline(deadline_s)
        got = self._already_came(number) if self._came else None
        while got is None:
            some = self._next(deadline, kind)
            if some.answers == number:
                got = some
            else:
                self.put_aside(some)
        if not isinstance(got.message, kind):
            name = type(got.message).__name__
            raise WireError(f"answered packet {number} with {name}; {kind.__name__} was expected")
        return got

    def next_message(self, deadline_s: float) -> Received[Any]:
        """The next one, which one read has not brought."""
        return self._next(Deadline(deadline_s))

    def look(self) -> None:
        """Raise WireError where nothing can come any more."""
        self._readiness.sleep(NOW)

    def _already_came(self, number: int) -> Received[Any] | None:
        for each in self._came:
            if each.answers == number:
                self._came.remove(each)
                return each
        return None

    def _next(self, deadline: Deadline, kind: type[Message] | None = None) -> Received[Any]:
        """The next message, which should be of this kind."""
        got = self._wait(deadline)
        if got is None:
            what = "a message" if kind is None else kind.__name__
            raise WireError(f"silent for {deadline.seconds:g} s, where {what} was expected")
        return got

    def _wait(self, deadline: Deadline) -> Received[Any] | None:
        """The next message, or None at the deadline: spun for where that pays, then waited for in a
        read, which wakes fastest, then slept for.
        """
        got = self._packets.receive(deadline.seconds)
        if got is not None:
            return got
        while got is None:
            waited_s = deadline.since_s()
            if waited_s >= deadline.seconds:
                return None
            self._readiness.sleep(deadline if waited_s >= IDLE_S else NOW)
            got = self._packets.receive_late(deadline.since_s() < min(IDLE_S, deadline.seconds))
        self._packets.patience.waited(deadline.since_s())
        return got

    def _until(self, attempt: Callable[[], T | None], fd: int, deadline: Deadline, what: str) -> T:
        """What `attempt` gives at last. Meanwhile what the other end says is taken in: it may be
        waiting to be read itself.
        """
        while True:
            result = attempt()
            if result is not None:
                return result
            if deadline.is_past:
                raise WireError(f"waited {deadline.seconds:g} s for it {what}")
            limit_ms = deadline.left_ms() if fd >= 0 else min(deadline.left_ms(), FULL_RING_MS)
            readable = self._readiness.sleep_to_write(fd, self._inbox.fd, limit_ms)
            if self._packets.fd in readable:
                got = self._packets.receive_late(False)
                if got is not None:
                    self.put_aside(got)
            if self._inbox.fd in readable:
                self._inbox.pull()

    def put_aside(self, got: Received[Any]) -> None:
        """Until somebody asks for it."""
        if len(self._came) >= MAX_ASIDE:
            raise WireError(f"more than {MAX_ASIDE} messages that nobody asked for")
        self._came.append(got)

    def _wait_for_bytes(self, fd: int) -> None:
        """Until bytes of a payload can be read."""
        try:
            self._readiness.sleep_for_bytes(fd)
        except WireError as error:
            self.fail(str(error))

    def fail(self, words: str) -> NoReturn:
        """Close it, and say why."""
        self.close(words)
        assert self.closed is not None
        raise ChannelClosed(self.closed) from None
