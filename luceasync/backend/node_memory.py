"""Memory that another process has made and gives out: regions lie where it says.

Knows no node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from luceasync.ipc.memory import SealedMemory


class LentMemory:
    """See HostMemory. Who lent it keeps a region until nobody here reads or writes it."""

    def __init__(self, memory: SealedMemory) -> None:
        self._memory = memory
        self._told: deque[int] = deque()

    def tell(self, offsets: Sequence[int]) -> None:
        """Where the next regions lie, in the order in which they will be asked for."""
        self._told = deque(offsets)

    def allocate(self, num_bytes: int) -> memoryview:
        """See HostMemory. Raises ValueError for a place that is none."""
        if not self._told:
            raise ValueError(f"no place was told for {num_bytes} bytes")
        begin = self._told.popleft()
        if begin + num_bytes > self._memory.num_bytes:
            raise ValueError(
                f"{num_bytes} bytes at {begin} of a memory of {self._memory.num_bytes}"
            )
        return self._memory.view[begin : begin + num_bytes]

    def close(self) -> None:
        """It is not ours."""
