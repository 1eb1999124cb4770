"""Which bytes of a ring are in use, and which of them have been read. Pure: no memory, no clock.

A payload is never split at the ring's end, and places are freed in the order in which they were
given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

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
