"""A channel on one machine: a SEQPACKET socket for packets, and an outbox and inbox for payloads.

Owns the sockets and every wait. Knows no process; its end is seen by `died_fd` and by the socket.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar, cast

from luceasync.cyext.packets import Traffic
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


class LocalChannel(Generic[M]):
    """See `luceasync.ipc.channel.Channel`. Call it from one thread."""

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
        self.traffic = Traffic()
        self.closed: str | None = None
        self._outbox = outbox
        self._inbox = inbox
        self._peer = peer
        self._patience = Patience.brief()
        self._spins = self._patience.spin_s > 0
        self._came: deque[Received[Any]] = deque()
        hooks = Hooks(self.fail, self._wait_for_bytes)
        self._packets = PacketSocket(control, codec, self.traffic, inbox, hooks)
        self._readiness = Readiness(self._packets.fd, died_fd)

    def register(self, register: Register) -> None:
        self._outbox.register(register)
        self._inbox.register(register)

    def keep_awake(self) -> None:
        self._patience = Patience.from_step_to_step()
        self._spins = self._patience.spin_s > 0

    def reserve(self, num_bytes: int, deadline_s: float) -> Outgoing:
        if self.closed is not None:
            raise ChannelClosed(self.closed)
        try:
            room = self._outbox.reserve(num_bytes)
            if room is not None:
                return room
            deadline = Deadline(deadline_s)
            return self._until(lambda: self._outbox.reserve(num_bytes), -1, deadline, "to read")
        except (WireError, OSError) as error:
            self.fail(str(error))

    def send(
        self,
        message: Message,
        payload: Outgoing | None = None,
        *,
        answers: int = 0,
        deadline_s: float,
    ) -> int:
        if self.closed is not None:
            raise ChannelClosed(self.closed)
        try:
            span: Told | None = None
            if payload is not None:
                span = self._outbox.commit(payload)
                self.traffic.payload_bytes_sent += span.num_bytes
            # Bytes first, as far as they go, so that one wake of the other end is enough.
            is_pushed = span is None or self._outbox.push()
            number = self._packets.send(message, answers, span)
            if number is not None and is_pushed and not self._packets.pings:
                return number
            deadline = Deadline(deadline_s)
            return self._send_on(message, span, answers, deadline, number, is_pushed)
        except (WireError, OSError) as error:
            self.fail(str(error))

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
                return self._send_on(message, span, answers, Deadline(deadline_s), number, True)
        except (WireError, OSError) as error:
            self.fail(str(error))
        room = self.reserve(payload.num_bytes, deadline_s)
        room.view[:] = payload.view(payload.num_bytes)
        return self.send(message, room, answers=answers, deadline_s=deadline_s)

    def receive(self, deadline_s: float) -> Received[M]:
        if self.closed is not None:
            raise ChannelClosed(self.closed)
        if self._came:
            return self._came.popleft()
        try:
            got: Received[M] | None = self._packets.receive(self._patience.spin_s, True)
            if got is None:
                return self._next(Deadline(deadline_s))
            if self._spins:
                self._patience.waited(self._packets.waited_s)
            return got
        except (WireError, OSError) as error:
            self.fail(str(error))

    def poll(self, timeout_s: float) -> bool:
        if self.closed is not None:
            raise ChannelClosed(self.closed)
        try:
            got = None if self._came else self._wait(Deadline(timeout_s))
        except (WireError, OSError) as error:
            self.fail(str(error))
        if got is not None:
            self._came.append(got)
        return bool(self._came)

    def answer(self, number: int, kind: type[A], deadline_s: float) -> Received[A]:
        if self.closed is not None:
            raise ChannelClosed(self.closed)
        try:
            if not self._came:  # it mostly is what comes next
                got = self._packets.receive(self._patience.spin_s, True)
                if got is None:
                    self._readiness.sleep(NOW)
                else:
                    if self._spins:
                        self._patience.waited(self._packets.waited_s)
                    if got.answers == number and isinstance(got.message, kind):
                        return cast("Received[A]", got)
                    self._put_aside(got)
            return self._answer(number, kind, Deadline(deadline_s))
        except (WireError, OSError) as error:
            self.fail(str(error))

    def call(
        self,
        message: Message,
        kind: type[A],
        payload: Outgoing | None = None,
        *,
        deadline_s: float,
    ) -> Received[A]:
        begun = time.monotonic()
        number = self.send(message, payload, deadline_s=deadline_s)
        left_s = round(deadline_s - (time.monotonic() - begun), 2)  # a read sleeps for as much
        return self.answer(number, kind, max(0.0, left_s))

    def ping(self, deadline_s: float) -> None:
        self.call(Ping(), Pong, deadline_s=deadline_s)

    def close(self, words: str = "closed here") -> None:
        if self.closed is None:
            self.closed = f"{self._peer}: {words}"
            self._came.clear()
            self._packets.close()
            self._outbox.close()
            self._inbox.close()

    def _send_on(
        self,
        message: Message,
        span: Told | None,
        answers: int,
        deadline: Deadline,
        number: int | None,
        is_pushed: bool,
    ) -> int:
        """What a socket that is full did not take: the packet, if it has no number, and bytes."""
        packets, push = self._packets, self._outbox.push
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

    def _answer(self, number: int, kind: type[A], deadline: Deadline) -> Received[A]:
        got = self._already_came(number) if self._came else None
        while got is None:
            some = self._next(deadline, kind)
            if some.answers == number:
                got = some
            else:
                self._put_aside(some)
        if not isinstance(got.message, kind):
            name = type(got.message).__name__
            raise WireError(f"answered packet {number} with {name}; {kind.__name__} was expected")
        return got

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
        got: Received[Any] | None
        spin_s = min(self._patience.spin_s, deadline.seconds)
        got = self._packets.receive(spin_s, deadline.seconds > 0)
        if got is not None:
            if self._spins:
                self._patience.waited(self._packets.waited_s)
            return got
        while got is None:
            waited_s = deadline.since_s()
            if waited_s >= deadline.seconds:
                return None
            self._readiness.sleep(deadline if waited_s >= IDLE_S else NOW)
            got = self._packets.receive(0.0, deadline.since_s() < min(IDLE_S, deadline.seconds))
        if self._spins:
            self._patience.waited(deadline.since_s())
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
                got = self._packets.receive(0.0, False)
                if got is not None:
                    self._put_aside(got)
            if self._inbox.fd in readable:
                self._inbox.pull()

    def _put_aside(self, got: Received[Any]) -> None:
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
