"""Payloads in memory that both ends map: a ring for each direction, written where they are read.

Owns the numbers that stand in the memory. What a payload is and where stands in the packet alone:
the memory is the other end's too, and may change at any moment.
"""

from __future__ import annotations

from contextlib import suppress

from luceasync.errors import ChannelClosed
from luceasync.ipc.channel import Outgoing, Payload
from luceasync.ipc.memory import Register, SealedMemory
from luceasync.ipc.packets import Span, WireError
from luceasync.ipc.payloads import Hooks, Room
from luceasync.ipc.ring import ALIGN_BYTES, Region, RingLedger, Watermark


class SharedOutbox:
    """The ring that this end writes. The other end writes how far it has read."""

    fd = -1

    def __init__(self, memory: SealedMemory, region: Region, first_sequence: int) -> None:
        self._memory = memory
        self._begin = region.begin
        self._ledger = RingLedger(region.end - region.begin, first_sequence)
        self._words = memory.view.cast("Q")
        self._read_word = region.word // 8
        self._num_read = first_sequence - 1
        self._words[self._read_word] = self._num_read

    def reserve(self, num_bytes: int) -> Room | None:
        read = self._words[self._read_word]
        if read != self._num_read:
            self._free_until(read)
        place = self._ledger.reserve(num_bytes)
        if place is None:
            return None
        begin = self._begin + place.begin
        self._words[(begin - ALIGN_BYTES) // 8] = 0  # who still reads what lay here sees that
        return Room(place, self._memory.view[begin : begin + num_bytes])

    def _free_until(self, read: int) -> None:
        if not self._num_read < read < self._ledger.next_sequence:
            raise WireError(f"it says that it has read payload {read}, which was not sent")
        self._num_read = read
        self._ledger.free_until(read)

    def commit(self, room: Outgoing) -> Span:
        assert isinstance(room, Room), "room of another channel"
        begin, num_bytes, sequence = room.place
        begin += self._begin
        self._words[(begin - ALIGN_BYTES) // 8] = sequence
        return Span(begin, num_bytes, sequence)

    def refer(self, payload: Payload) -> Span | None:
        return payload.lend(self._memory)

    def push(self) -> bool:
        return True

    def register(self, register: Register) -> None:
        self._memory.register(register)

    def close(self) -> None:
        self._words.release()


class SharedInbox:
    """The ring that the other end writes, and, if `is_lent`, all others of the memory: what
    one group has written, another may be told to read.
    """

    fd = -1

    def __init__(
        self, memory: SealedMemory, region: Region, first_sequence: int, *, is_lent: bool
    ) -> None:
        self.memory = memory
        self._begin, self._end, word = region
        self._read_word = word // 8
        self._bounds = (0, memory.num_bytes) if is_lent else (region.begin, region.end)
        self._watermark = Watermark(first_sequence)
        self._words = memory.view.cast("Q")
        self.is_closed = False

    def accept(self, span: Span, hooks: Hooks) -> SharedPayload:
        at, num_bytes, sequence = span.begin, span.num_bytes, span.sequence
        begin, end = self._bounds
        if at + num_bytes > end or at < begin + ALIGN_BYTES:
            raise WireError(f"{_told(span)} outside of [{begin}, {end})")
        if at % ALIGN_BYTES:
            raise WireError(f"{_told(span)}, not at a multiple of {ALIGN_BYTES}")
        is_own = self._begin <= at < self._end
        if is_own and not self._watermark.came(sequence):
            raise WireError(f"payload {sequence} again")
        if self._words[(at - ALIGN_BYTES) // 8] != sequence:
            raise WireError(self.doubt(span))
        return SharedPayload(self, span, hooks, is_own)

    def doubt(self, span: Span) -> str:
        """Why the bytes are not those of the span, or nothing."""
        found = self._words[span.begin // 8 - ALIGN_BYTES // 8]
        return "" if found == span.sequence else f"{_told(span)}, where payload {found} lies"

    def done(self, span: Span) -> None:
        """Let the sender reuse it."""
        if not self.is_closed:
            self._words[self._read_word] = self._watermark.done(span.sequence)

    def pull(self) -> None:
        pass

    def register(self, register: Register) -> None:
        self.memory.register(register)

    def close(self) -> None:
        self.is_closed = True
        self._words.release()


class SharedPayload:
    """Bytes in the shared memory. One that lies in a third process's ring is freed by whoever
    forwarded it.
    """

    __slots__ = ("_hooks", "_inbox", "_is_freed", "_is_own", "_span", "_view", "num_bytes")

    def __init__(self, inbox: SharedInbox, span: Span, hooks: Hooks, is_own: bool) -> None:
        self._inbox = inbox
        self._span = span
        self._hooks = hooks
        self._is_own = is_own
        self._is_freed = False
        self._view: memoryview | None = None
        self.num_bytes = span.num_bytes

    def lend(self, memory: object) -> Span | None:
        return self._span if memory is self._inbox.memory else None

    def view(self, num_bytes: int) -> memoryview:
        assert not self._is_freed, "a payload that was freed"
        if self._inbox.is_closed:
            raise ChannelClosed("the channel of this payload is closed")
        if num_bytes != self.num_bytes:
            self._hooks.fail(f"a payload of {self.num_bytes} bytes came, {num_bytes} were expected")
        if self._view is None:
            begin = self._span.begin
            self._view = self._inbox.memory.view[begin : begin + num_bytes]
        return self._view

    def into(self, target: memoryview) -> None:
        view = self.view(target.nbytes)
        (target if target.format == "B" else target.cast("B"))[:] = view
        self.free()

    def free(self) -> None:
        if self._is_freed:
            return
        self._is_freed = True
        if self._view is not None:
            with suppress(BufferError):  # somebody made a tensor of it: the memory stays with that
                self._view.release()
            self._view = None
        if self._inbox.is_closed:
            return
        words = self._inbox.doubt(self._span)
        if words:
            self._hooks.fail(f"{words}: it was written while it was read")
        if self._is_own:
            self._inbox.done(self._span)


def _told(span: Span) -> str:
    end = span.begin + span.num_bytes
    return f"payload {span.sequence} was said to lie in [{span.begin}, {end})"
