"""Payloads in memory that both ends map: a ring for each direction, written where they are read.

What a payload is and where stands in the packet alone: the memory is the other end's too, and may
change at any moment. luceasync.cyext.rings owns the numbers that stand in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

from luceasync.cyext.rings import RingReader, RingWriter
from luceasync.ipc.channel import Outgoing, Payload
from luceasync.ipc.memory import Register, SealedMemory
from luceasync.ipc.packets import Span, WireError

# Which bytes of a ring are in use, and which of them have been read. Pure: no memory, no clock.
# A payload is never split at the ring's end, and places are freed in the order in which they
# were given.


ALIGN_BYTES = 256  # of payloads, for devices; as much stands before each one, for its sequence
WORDS_BYTES = 4096  # at the beginning of a memory: for each ring how far it has been read
WORD_STRIDE_BYTES = 64  # two of these words share no cache line
PAGE_BYTES = 4096


class Place(NamedTuple):
    """Bytes `[begin, begin + num_bytes)` of a ring, and the number of their payload."""

    begin: int
    num_bytes: int
    sequence: int


class RingLedger:
    """Places of a ring: given at its head, freed at its tail."""

    def __init__(self, num_bytes: int, first_sequence: int = 1) -> None:
        self.num_bytes = num_bytes
        self.next_sequence = first_sequence
        self._in_use: deque[tuple[int, int, int]] = deque()  # sequence, begin, end
        self._head = 0

    @property
    def largest_bytes(self) -> int:
        """Of a payload that fits."""
        return max(0, (self.num_bytes - ALIGN_BYTES) // ALIGN_BYTES * ALIGN_BYTES)

    def reserve(self, num_bytes: int) -> Place | None:
        """Room for a payload, or None until others are freed.

        Raises ValueError for one that never fits.
        """
        taken = ALIGN_BYTES - -num_bytes // ALIGN_BYTES * ALIGN_BYTES
        if taken > self.num_bytes:
            raise ValueError(f"a payload of {num_bytes} bytes in a ring of {self.num_bytes}")
        begin = self._find(taken) if self._in_use else 0  # the same bytes: caches hold them
        if begin is None:
            return None
        self._head = begin + taken
        place = Place(begin + ALIGN_BYTES, num_bytes, self.next_sequence)
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
    """Up to which payload all have been read, where they are done with in any order."""

    def __init__(self, first_sequence: int = 1) -> None:
        self.value = first_sequence - 1
        self._last = self.value
        self._held: deque[int] = deque()
        self._done: set[int] = set()

    def came(self, sequence: int) -> bool:
        """Note a payload; False if it is older than one that has come."""
        if sequence <= self._last:
            return False
        self._last = sequence
        self._held.append(sequence)
        return True

    def done(self, sequence: int) -> int:
        """Note that it has been read; the value after that."""
        self._done.add(sequence)
        while self._held and self._held[0] in self._done:
            self.value = self._held.popleft()
            self._done.discard(self.value)
        return self.value


class Region(NamedTuple):
    """A ring's bytes of a memory, and where the word lies that says how far it has been read."""

    begin: int
    end: int
    word: int


def lay_out(ring_bytes: Sequence[int]) -> tuple[int, list[Region]]:
    """Bytes of a memory for rings of these sizes, and where each one lies."""
    assert len(ring_bytes) * WORD_STRIDE_BYTES <= WORDS_BYTES, "too many rings for a memory"
    regions, end = [], WORDS_BYTES
    for number, num_bytes in enumerate(ring_bytes):
        begin, end = end, end + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        regions.append(Region(begin, end, number * WORD_STRIDE_BYTES))
    return end, regions


class SharedOutbox(RingWriter):
    """The ring that this end writes. The other end writes how far it has read."""

    fd = -1

    def __init__(self, memory: SealedMemory, region: Region, first_sequence: int) -> None:
        super().__init__(memory.view, *region, first_sequence, WireError)
        self._memory = memory

    def refer(self, payload: Payload) -> Span | None:
        return payload.lend(self._memory)

    def register(self, register: Register) -> None:
        self._memory.register(register)


class SharedInbox(RingReader):
    """The ring that the other end writes, and, if `is_lent`, all others of the memory: what
    one group has written, another may be told to read. A payload that lies in a third process's
    ring is freed by whoever forwarded it.
    """

    fd = -1

    def __init__(
        self, memory: SealedMemory, region: Region, first_sequence: int, *, is_lent: bool
    ) -> None:
        bounds = (0, memory.num_bytes) if is_lent else (region.begin, region.end)
        super().__init__(memory.view, *region, first_sequence, WireError, *bounds, memory, Span)
        self._memory = memory

    def pull(self) -> None:
        pass

    def register(self, register: Register) -> None:
        self._memory.register(register)


# How a channel of one machine moves payloads: what its bodies, shared and stream, have in
# common. Knows no packets but the span that stands in them.


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
