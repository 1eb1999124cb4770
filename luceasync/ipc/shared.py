"""Payloads in memory that both ends map: a ring for each direction.

Only the packet states where a payload is and how large: the other end can change the memory at any
moment. luceasync.cyext.rings owns the numbers in that memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

from luceasync.cyext.rings import RingReader, RingWriter
from luceasync.ipc.channel import OutgoingPayload, Payload
from luceasync.ipc.memory import Register, SealedMemory
from luceasync.ipc.packets import PayloadSpan, WireError

ALIGN_BYTES = 256  # of payloads, for devices; the sequence number before each takes the same space
WORDS_BYTES = 4096  # at the beginning of the memory: a word for each ring, how far it has been read
WORD_STRIDE_BYTES = 64  # so that no two of these words share a cache line
PAGE_BYTES = 4096


class RingPlace(NamedTuple):
    """Bytes `[begin, begin + num_bytes)` of a ring, and the sequence number of their payload."""

    begin: int
    num_bytes: int
    sequence: int


class RingLedger:
    """Which bytes of a ring are in use: allocated at its head, freed at its tail, in order. A
    payload is never split at the ring's end.
    """

    def __init__(self, num_bytes: int, first_sequence: int = 1) -> None:
        self.num_bytes = num_bytes
        self.next_sequence = first_sequence
        self._in_use: deque[tuple[int, int, int]] = deque()  # sequence, begin, end
        self._head = 0

    @property
    def largest_bytes(self) -> int:
        """The largest payload that fits."""
        return max(0, (self.num_bytes - ALIGN_BYTES) // ALIGN_BYTES * ALIGN_BYTES)

    def reserve(self, num_bytes: int) -> RingPlace | None:
        """Allocate a payload; None: others must be freed first. Raises ValueError if it can never
        fit."""
        taken = ALIGN_BYTES - -num_bytes // ALIGN_BYTES * ALIGN_BYTES
        if taken > self.num_bytes:
            raise ValueError(f"a payload of {num_bytes} bytes in a ring of {self.num_bytes}")
        # Reuse the same bytes, which are in the caches.
        begin = self._find(taken) if self._in_use else 0
        if begin is None:
            return None
        self._head = begin + taken
        place = RingPlace(begin + ALIGN_BYTES, num_bytes, self.next_sequence)
        self._in_use.append((self.next_sequence, begin, self._head))
        self.next_sequence += 1
        return place

    def _find(self, taken: int) -> int | None:
        tail = self._in_use[0][1]
        if self._head > tail:
            if self._head + taken <= self.num_bytes:
                return self._head
            return 0 if taken <= tail else None
        return self._head if self._head + taken <= tail else None

    def free_until(self, sequence: int) -> None:
        """Free every place up to that of `sequence`."""
        while self._in_use and self._in_use[0][0] <= sequence:
            self._in_use.popleft()


class Watermark:
    """The last payload up to which all have been read, in whatever order that happens."""

    def __init__(self, first_sequence: int = 1) -> None:
        self.value = first_sequence - 1
        self._last = self.value
        self._held: deque[int] = deque()
        self._done: set[int] = set()

    def came(self, sequence: int) -> bool:
        """Record that a payload arrived; returns False if it is older than an earlier one."""
        if sequence <= self._last:
            return False
        self._last = sequence
        self._held.append(sequence)
        return True

    def done(self, sequence: int) -> int:
        """Record that a payload has been read. Returns the new value."""
        self._done.add(sequence)
        while self._held and self._held[0] in self._done:
            self.value = self._held.popleft()
            self._done.discard(self.value)
        return self.value


class RingRegion(NamedTuple):
    """A ring's bytes in a memory, and the offset of the word that holds how far it has been
    read."""

    begin: int
    end: int
    word: int


def lay_out(ring_bytes: Sequence[int]) -> tuple[int, list[RingRegion]]:
    """The size of a memory for rings of these sizes, and where each one lies."""
    assert len(ring_bytes) * WORD_STRIDE_BYTES <= WORDS_BYTES, "too many rings for a memory"
    regions, end = [], WORDS_BYTES
    for number, num_bytes in enumerate(ring_bytes):
        begin, end = end, end + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        regions.append(RingRegion(begin, end, number * WORD_STRIDE_BYTES))
    return end, regions


class SharedOutbox(RingWriter):
    """The ring that this end writes; the other end writes how far it has read it."""

    fd = -1

    def __init__(self, memory: SealedMemory, region: RingRegion, first_sequence: int) -> None:
        super().__init__(memory.view, *region, first_sequence, WireError)
        self._memory = memory

    def refer(self, payload: Payload) -> PayloadSpan | None:
        return payload.lend(self._memory)

    def register(self, register: Register) -> None:
        self._memory.register(register)


class SharedInbox(RingReader):
    """The ring that the other end writes, and, if `is_lent`, all rings of the memory: the other end
    may forward what a third process has written. The process that forwarded it frees it.
    """

    fd = -1

    def __init__(
        self, memory: SealedMemory, region: RingRegion, first_sequence: int, *, is_lent: bool
    ) -> None:
        bounds = (0, memory.num_bytes) if is_lent else (region.begin, region.end)
        super().__init__(
            memory.view, *region, first_sequence, WireError, *bounds, memory, PayloadSpan
        )
        self._memory = memory

    def pull(self) -> None:
        pass

    def register(self, register: Register) -> None:
        self._memory.register(register)


class RingRoom(NamedTuple):
    """See OutgoingPayload: a place in the ring, and its bytes."""

    place: RingPlace
    view: memoryview


@dataclass(frozen=True, slots=True)
class ChannelHooks:
    """What a payload needs from its channel. `fail` closes it and raises ChannelClosed; `wait`
    sleeps until a descriptor can be read, or fails."""

    fail: Callable[[str], NoReturn]
    wait: Callable[[int], None]


class SpanFields(Protocol):
    """See PayloadSpan."""

    @property
    def begin(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def sequence(self) -> int: ...


class PayloadOutbox(Protocol):
    """Payloads to be sent."""

    @property
    def fd(self) -> int:
        """Becomes writable when push() can continue; -1: push() never stops."""

    def reserve(self, num_bytes: int) -> OutgoingPayload | None:
        """Allocate room; None: more must be read first. Raises ValueError, WireError."""

    def commit(self, room: OutgoingPayload) -> SpanFields:
        """The span for the packet; its bytes are final."""

    def refer(self, payload: Payload) -> PayloadSpan | None:
        """The span of a payload that the other end can read in place; None: it cannot."""

    def push(self) -> bool:
        """Send as much as possible of the committed payloads; returns whether everything is sent.
        Raises OSError."""

    def register(self, register: Register) -> None: ...

    def close(self) -> None: ...


class PayloadInbox(Protocol):
    """Received payloads."""

    def accept(self, begin: int, num_bytes: int, sequence: int, hooks: ChannelHooks) -> Payload:
        """The payload of a packet. Raises WireError for an invalid span."""

    def pull(self) -> None:
        """Receive without waiting, so that the other end can continue to send. Raises WireError,
        OSError."""

    @property
    def fd(self) -> int:
        """Becomes readable when pull() can continue; -1: there is nothing to pull."""

    def register(self, register: Register) -> None: ...

    def close(self) -> None: ...
