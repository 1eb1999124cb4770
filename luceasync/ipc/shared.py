"""Payloads in memory that both ends map: a ring for each direction, written where they are read.

What a payload is and where stands in the packet alone: the memory is the other end's too, and may
change at any moment. luceasync.cyext.rings owns the numbers that stand in it.
"""

from __future__ import annotations

from luceasync.cyext.rings import RingReader, RingWriter
from luceasync.ipc.channel import Payload
from luceasync.ipc.memory import Register, SealedMemory
from luceasync.ipc.packets import Span, WireError
from luceasync.ipc.ring import Region


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
