"""Payloads as bytes through a second socket, for systems without shared memory.

Owns the bytes that wait on either side, in rings that a device can register.
"""

from __future__ import annotations

import mmap
import socket
from collections import deque
from collections.abc import Callable

from luceasync.errors import ChannelClosed
from luceasync.ipc.channel import OutgoingPayload, Payload
from luceasync.ipc.memory import Register
from luceasync.ipc.packets import PayloadSpan, WireError
from luceasync.ipc.shared import ChannelHooks, RingLedger, RingPlace, RingRoom, Watermark


class _Ring:
    """A ring in private memory."""

    def __init__(self, num_bytes: int) -> None:
        self.ledger = RingLedger(num_bytes)
        self._map = mmap.mmap(-1, num_bytes)
        self._view = memoryview(self._map)
        self._undo: Callable[[], None] | None = None

    def reserve(self, num_bytes: int) -> RingRoom | None:
        place = self.ledger.reserve(num_bytes)
        if place is None:
            return None
        return RingRoom(place, self._view[place.begin : place.begin + num_bytes])

    def register(self, register: Register) -> None:
        if self._undo is None:
            self._undo = register(self._view)

    def close(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
        self._view.release()  # the mapping is freed with its last view


class StreamOutbox:
    """See PayloadOutbox. Bytes are sent in the order of their packets."""

    def __init__(self, sock: socket.socket, ring_bytes: int, first_sequence: int) -> None:
        self._sock = sock
        self._ring = _Ring(ring_bytes)
        self._next_sequence = first_sequence
        self._queue: deque[tuple[RingPlace, memoryview]] = deque()

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def reserve(self, num_bytes: int) -> RingRoom | None:
        return self._ring.reserve(num_bytes)

    def commit(self, room: OutgoingPayload) -> PayloadSpan:
        assert isinstance(room, RingRoom), "room of another channel"
        self._queue.append((room.place, room.view))
        span = PayloadSpan(0, room.place.num_bytes, self._next_sequence)
        self._next_sequence += 1
        return span

    def refer(self, payload: Payload) -> PayloadSpan | None:
        return None

    def push(self) -> bool:
        while self._queue:
            place, view = self._queue[0]
            try:
                num_sent = self._sock.send(view, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            if num_sent < len(view):
                self._queue[0] = (place, view[num_sent:])
                continue
            self._queue.popleft()
            self._ring.ledger.free_until(place.sequence)
        return True

    def register(self, register: Register) -> None:
        self._ring.register(register)

    def close(self) -> None:
        self._queue.clear()
        self._ring.close()
        self._sock.close()


class StreamInbox:
    """See PayloadInbox. Bytes stay in the socket until they, or later ones, are needed."""

    def __init__(self, sock: socket.socket, ring_bytes: int, first_sequence: int) -> None:
        self._sock = sock
        self._ring = _Ring(ring_bytes)
        self._watermark = Watermark()
        self._next_sequence = first_sequence
        self._due: deque[StreamPayload] = deque()  # payloads whose bytes have not all arrived
        self._is_full = False  # nothing can be received until a payload is freed
        self.is_closed = False

    @property
    def fd(self) -> int:
        return self._sock.fileno() if self._due and not self._is_full else -1

    def accept(
        self, begin: int, num_bytes: int, sequence: int, hooks: ChannelHooks
    ) -> StreamPayload:
        if begin != 0:
            raise WireError(f"a payload at {begin}, where payloads come as bytes")
        if sequence != self._next_sequence:
            raise WireError(f"payload {sequence}; {self._next_sequence} was expected")
        largest = self._ring.ledger.largest_bytes
        if num_bytes > largest:
            raise WireError(f"a payload of {num_bytes} bytes; at most {largest} may come")
        self._next_sequence += 1
        payload = StreamPayload(self, num_bytes, hooks)
        self._due.append(payload)
        return payload

    def pull(self) -> None:
        while self._due and self._pull(self._due[0]):
            self._due.popleft()

    def _pull(self, payload: StreamPayload) -> bool:
        """Receive more of a payload; returns whether it is complete."""
        if payload.target is None:
            room = self._ring.reserve(payload.num_bytes)
            self._is_full = room is None
            if room is None:
                return False
            self._watermark.came(room.place.sequence)
            payload.place, payload.target = room.place, room.view
        return self._fill(payload, payload.target)

    def _fill(self, payload: StreamPayload, target: memoryview) -> bool:
        while payload.num_read < payload.num_bytes:
            try:
                count = self._sock.recv_into(target[payload.num_read :])
            except BlockingIOError:
                return False
            if count == 0:
                told = f"{payload.num_read} of {payload.num_bytes} bytes"
                raise WireError(f"a payload ended after {told}")
            payload.num_read += count
        return True

    def load(self, payload: StreamPayload, target: memoryview | None, hooks: ChannelHooks) -> None:
        """Wait until the bytes are in the ring, or in `target` if none has been received yet."""
        try:
            while payload in self._due:
                first = self._due[0]
                if first is payload and payload.target is None and target is not None:
                    payload.target = target
                if self._pull(first):
                    self._due.popleft()
                elif first.target is None:
                    raise WireError("more payloads than its ring holds, none of which is freed")
                else:
                    hooks.wait(self._sock.fileno())
        except (WireError, OSError) as error:
            hooks.fail(str(error))

    def done(self, place: RingPlace) -> None:
        """Free the place of a payload."""
        self._ring.ledger.free_until(self._watermark.done(place.sequence))
        self._is_full = False

    def register(self, register: Register) -> None:
        self._ring.register(register)

    def close(self) -> None:
        self.is_closed = True
        self._due.clear()
        self._ring.close()
        self._sock.close()


class StreamPayload:
    """A payload in the socket, in the ring of the inbox, or partly in both."""

    def __init__(self, inbox: StreamInbox, num_bytes: int, hooks: ChannelHooks) -> None:
        self.num_bytes = num_bytes
        self.num_read = 0
        self.place: RingPlace | None = None  # its place in the ring, if it is there
        self.target: memoryview | None = None
        self._inbox = inbox
        self._hooks = hooks
        self._is_freed = False

    def view(self, num_bytes: int) -> memoryview:
        self._expect(num_bytes)
        self._inbox.load(self, None, self._hooks)
        assert self.target is not None
        return self.target

    def into(self, target: memoryview) -> None:
        self._expect(target.nbytes)
        target = target.cast("B")
        self._inbox.load(self, target, self._hooks)
        assert self.target is not None
        if self.target is not target:
            target[:] = self.target
        self.free()

    def lend(self, memory: object) -> PayloadSpan | None:
        return None

    def free(self) -> None:
        if self._is_freed or self._inbox.is_closed:
            return
        self._inbox.load(
            self, None, self._hooks
        )  # its bytes must not be taken for the next payload's
        self._is_freed = True
        self.target = None
        if self.place is not None:
            self._inbox.done(self.place)

    def _expect(self, num_bytes: int) -> None:
        assert not self._is_freed, "a payload that was freed"
        if self._inbox.is_closed:
            raise ChannelClosed("the channel of this payload is closed")
        if num_bytes != self.num_bytes:
            self._hooks.fail(
                f"a payload of {self.num_bytes} bytes arrived; {num_bytes} were expected"
            )
