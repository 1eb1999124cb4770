"""A channel on one machine: a SEQPACKET socket for packets, and an outbox and inbox for payloads.

Owns the sockets and all waits. Does not know the process: `died_fd` and the socket show that it has
ended.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from luceasync.cyext import packets
from luceasync.cyext.packets import PacketPort, QuickChannel
from luceasync.errors import ChannelClosed
from luceasync.ipc.channel import OutgoingPayload, Payload, Received
from luceasync.ipc.memory import Register
from luceasync.ipc.packets import Codec, Message, Ping, Pong, WireError
from luceasync.ipc.shared import ChannelHooks, PayloadInbox, PayloadOutbox, SpanFields

MAX_PINGS = 64  # pings whose answers do not fit into the socket yet
WAIT_US = 10_000  # by then the end of a process is noticed, even if others have its socket


class PacketSocket(PacketPort):
    """Sends and receives packets of one session, and answers pings. Linux keeps each packet whole,
    or truncates it and reports that. A blocking read wakes faster than poll(2) followed by a read.
    """

    def __init__(
        self,
        sock: socket.socket,
        codec: Codec,
        patience: packets.Patience,
        inbox: PayloadInbox,
        hooks: ChannelHooks,
    ) -> None:
        sock.setblocking(True)  # waiting reads have SO_RCVTIMEO, others MSG_DONTWAIT
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, WAIT_US))
        super().__init__(sock.fileno(), codec, patience, Ping, inbox.accept, hooks)
        self._sock = sock
        self.pings: deque[int] = deque()

    def take_ping(self, number: int, has_payload: bool) -> None:
        """Answer a ping as soon as there is room. Raises WireError."""
        if has_payload or len(self.pings) >= MAX_PINGS:
            raise WireError("a ping with a payload, or more pings than can be answered")
        self.pings.append(number)
        self.answer_pings()

    def answer_pings(self) -> None:
        """Answer as many pings as the socket accepts now."""
        while self.pings and self.send(Pong(), self.pings[0]) is not None:
            self.pings.popleft()

    def close(self) -> None:
        """Close it, which the other end notices even if other processes have the socket.
        Idempotent."""
        with suppress(OSError):  # already closed at one of the ends
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


# Waking a sleeper takes 50 to 200 us, and a step of a model some milliseconds: if cores are spare,
# one of them spins from step to step. On two busy cores, a spin of 20 us doubles a hop.
MAX_SPIN_S = 20e-3
SPARE_CORES = 8
# Waking an idle core takes longer than a short answer, and the answer of an idle core arrives after
# its wake, with cold caches: 60 to 130 us.
BRIEF_SPIN_S = 200e-6
MAX_CREDIT = 3  # spins in a row that may fail: an occasional late answer does not stop spinning
PROBE_EVERY = 64  # waits between attempts to spin again, after it did not pay off


class Deadline:
    """A moment by which something must happen."""

    __slots__ = ("_begun", "seconds")

    def __init__(self, seconds: float) -> None:
        """`seconds` from now. Raises ValueError unless that is a finite number, 0 or more."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a deadline in {seconds} s")
        self.seconds = seconds
        self._begun = time.monotonic()

    def since_s(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._begun

    def left_ms(self) -> int:
        """For poll(2): rounded up, so that a wait is never a spin."""
        return math.ceil(max(0.0, self.seconds - self.since_s()) * 1e3)

    @property
    def is_past(self) -> bool:
        return self.since_s() >= self.seconds


class WaitPolicy(packets.Patience):
    """Whether to spin before sleeping, and for how long at most; see Patience."""

    @classmethod
    def brief(cls, num_cores: int | None = None) -> WaitPolicy:
        """Spin briefly, with two cores or more. `num_cores`: usable ones; None: ask the system."""
        return cls._of(BRIEF_SPIN_S if _count(num_cores) > 1 else 0.0, trusts_sleep=False)

    @classmethod
    def from_step_to_step(cls, num_cores: int | None = None) -> WaitPolicy:
        """Spin through a step, if cores are spare: for processes that compute on devices."""
        if _count(num_cores) < SPARE_CORES:
            return cls.brief(num_cores)
        return cls._of(MAX_SPIN_S, trusts_sleep=True)

    @classmethod
    def _of(cls, max_s: float, *, trusts_sleep: bool) -> WaitPolicy:
        return cls(max_s, trusts_sleep=trusts_sleep, max_credit=MAX_CREDIT, probe_every=PROBE_EVERY)


def _count(num_cores: int | None) -> int:
    return len(os.sched_getaffinity(0)) if num_cores is None else num_cores


PAYLOAD_WAIT_S = 10.0  # without any byte of an announced payload
ENDED = "its process has ended"


class Readiness:
    """Sleeps until descriptors of one channel are ready, or the process at its other end has
    ended. Owns no descriptor.
    """

    def __init__(self, packets_fd: int, died_fd: int) -> None:
        """`died_fd` becomes readable when the process ends; negative: there is none."""
        self._packets_fd = packets_fd
        self._died_fd = died_fd
        self._reading = select.poll()
        self._reading.register(packets_fd, select.POLLIN)
        if died_fd >= 0:
            self._reading.register(died_fd, select.POLLIN)

    def sleep(self, deadline: Deadline) -> None:
        """Sleep until a packet can be read. Raises WireError if none will arrive."""
        happened = self._reading.poll(deadline.left_ms())
        if len(happened) == 1 and happened[0][0] == self._died_fd:
            raise WireError(ENDED)

    def sleep_for_bytes(self, fd: int) -> None:
        """Sleep until bytes of a payload can be read. Raises WireError if none arrive."""
        wanted = {fd: select.POLLIN, self._died_fd: select.POLLIN}
        happened = _happened(wanted, int(PAYLOAD_WAIT_S * 1e3))
        if not happened:
            raise WireError(f"no byte of a payload for {PAYLOAD_WAIT_S:g} s")
        if fd not in happened:
            raise WireError(ENDED)

    def sleep_to_write(self, fd: int, bytes_fd: int, limit_ms: int) -> set[int]:
        """Sleep until `fd` can be written, or packets or `bytes_fd` can be read. Returns the
        descriptors that can be read. Raises WireError if the process has ended.
        """
        wanted = dict.fromkeys((self._packets_fd, bytes_fd, self._died_fd), select.POLLIN)
        wanted[fd] = wanted.get(fd, 0) | select.POLLOUT
        happened = _happened(wanted, limit_ms)
        readable = {fd for fd, events in happened.items() if events & ~select.POLLOUT}
        if self._died_fd in readable and self._packets_fd not in readable:
            raise WireError(ENDED)
        return readable


def _happened(wanted: dict[int, int], limit_ms: int) -> dict[int, int]:
    """The first of these events, by descriptor; negative descriptors are skipped."""
    waiting = select.poll()
    for fd, events in wanted.items():
        if fd >= 0:
            waiting.register(fd, events)
    return dict(waiting.poll(limit_ms))


M = TypeVar("M")
A = TypeVar("A", bound=Message)
T = TypeVar("T")

MAX_ASIDE = 1024  # messages that were not requested yet
FULL_RING_MS = 1  # how often to check a full ring, as nothing wakes a waiter for it
IDLE_S = 0.05  # time without a message, before it sleeps until one arrives
NOW = Deadline(0)
FATAL = (WireError, OSError)  # errors that close a channel


class LocalChannel(QuickChannel[M]):
    """See Channel. Call it from one thread. The base class is compiled, and does everything that
    never waits; this class has the slow paths."""

    def __init__(
        self,
        control: socket.socket,
        codec: Codec,
        outbox: PayloadOutbox,
        inbox: PayloadInbox,
        peer: str,
        died_fd: int = -1,
    ) -> None:
        """Takes over the socket and both boxes. `peer`: the other end's name in errors; `died_fd`
        becomes readable when its process ends.
        """
        hooks = ChannelHooks(self.fail, self._wait_for_bytes)
        self._packets = PacketSocket(control, codec, WaitPolicy.brief(), inbox, hooks)
        super().__init__(self._packets, outbox, deque(), ChannelClosed, FATAL)
        self._outbox = outbox
        self._inbox = inbox
        self._peer = peer
        self._readiness = Readiness(self._packets.fd, died_fd)

    def register(self, register: Register) -> None:
        self._outbox.register(register)
        self._inbox.register(register)

    def keep_awake(self) -> None:
        self._packets.patience = WaitPolicy.from_step_to_step()

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
        except FATAL as error:
            self.fail(str(error))
        room = self.reserve(payload.num_bytes, deadline_s)
        room.view[:] = payload.view(payload.num_bytes)
        return self.send(message, room, answers=answers, deadline_s=deadline_s)

    def poll(self, timeout_s: float) -> bool:
        if self.closed is not None:
            raise ChannelClosed(self.closed)
        try:
            got = None if self._came else self._wait(Deadline(timeout_s))
        except FATAL as error:
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

    def reserve_later(self, num_bytes: int, deadline_s: float) -> OutgoingPayload:
        """Wait for room in a full ring."""
        deadline = Deadline(deadline_s)
        return self._until(lambda: self._outbox.reserve(num_bytes), -1, deadline, "to read")

    def send_on(
        self,
        message: Message,
        span: SpanFields | None,
        answers: int,
        deadline_s: float,
        number: int | None,
        is_pushed: bool,
    ) -> int:
        """Send what a full socket did not accept: the packet, if it has no number yet, and
        bytes."""
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
        """The answer to packet `number`, which has arrived already or is not the next message."""
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
        """Wait for the next message, which a single read did not return."""
        return self._next(Deadline(deadline_s))

    def look(self) -> None:
        """Raise WireError if nothing can arrive any more."""
        self._readiness.sleep(NOW)

    def _already_came(self, number: int) -> Received[Any] | None:
        for each in self._came:
            if each.answers == number:
                self._came.remove(each)
                return each
        return None

    def _next(self, deadline: Deadline, kind: type[Message] | None = None) -> Received[Any]:
        """Wait for the next message; `kind` is named in the error."""
        got = self._wait(deadline)
        if got is None:
            what = "a message" if kind is None else kind.__name__
            raise WireError(f"silent for {deadline.seconds:g} s, where {what} was expected")
        return got

    def _wait(self, deadline: Deadline) -> Received[Any] | None:
        """The next message, or None at the deadline. Spins if that pays off, then blocks in a read,
        which wakes fastest, then sleeps."""
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
        """Retry `attempt` until it returns something. Receives meanwhile: the other end may be
        blocked until its messages are read."""
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
        """Keep a message until it is requested."""
        if len(self._came) >= MAX_ASIDE:
            raise WireError(f"more than {MAX_ASIDE} messages that were not asked for")
        self._came.append(got)

    def _wait_for_bytes(self, fd: int) -> None:
        """Sleep until bytes of a payload can be read."""
        try:
            self._readiness.sleep_for_bytes(fd)
        except WireError as error:
            self.fail(str(error))

    def fail(self, words: str) -> NoReturn:
        """Close the channel, and raise the reason."""
        self.close(words)
        assert self.closed is not None
        raise ChannelClosed(self.closed) from None
