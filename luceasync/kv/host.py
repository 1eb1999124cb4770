"""Host memory that holds nodes: bytes that go back when the last view of them is gone.

Owns where regions lie and, beside GPUs, that their pages stay in place for copies by the device.
Knows no node, no tensor and no file.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

ALIGNMENT_BYTES = 4096  # what direct file access asks for
# A device copies host memory in pieces that cross no multiple of this: two ranges that were
# registered apart cannot be copied as one, and small copies of others get in between.
PIECE_BYTES = 8 << 20
SLAB_BYTES = 32 * PIECE_BYTES
HUGE_PAGE_BYTES = 2 << 20  # systems place a mapping of whole ones so that it can have them
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not for the current one alone

log = logging.getLogger(__name__)


class HostMemory(Protocol):
    """Where nodes lie. Any thread may allocate."""

    def allocate(self, num_bytes: int) -> memoryview:
        """Writable bytes of any content, more than 0, at a page's begin. They go back when no
        memoryview, array or tensor over them is left. Raises MemoryError where there is no room.
        """
        ...

    def close(self) -> None:
        """Give no more. What was given stays until its last view goes. May be called twice."""
        ...


class PlainMemory:
    """One mapping of the operating system for each region."""

    def allocate(self, num_bytes: int) -> memoryview:
        """See HostMemory."""
        return memoryview(_map(num_bytes))

    def close(self) -> None:
        """Nothing is held."""


class Holes:
    """Which parts of a range of bytes are free: sorted, and never two that touch. Pure."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._begins, self._ends, strict=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that are free."""
        return sum(self._ends) - sum(self._begins)

    def take(self, num_bytes: int) -> int | None:
        """Where the first hole of that size begins; it is no longer free. None if there is none."""
        for i, (begin, end) in enumerate(self):
            if end - begin >= num_bytes:
                self._begins[i] += num_bytes
                if self._begins[i] == end:
                    del self._begins[i], self._ends[i]
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        """Make `[begin, end)` free, which was not."""
        i = bisect_left(self._begins, begin)
        assert i == 0 or self._ends[i - 1] <= begin, f"{begin} is free already"
        assert i == len(self._begins) or end <= self._begins[i], f"{end} is free already"
        joins_left = i > 0 and self._ends[i - 1] == begin
        joins_right = i < len(self._begins) and self._begins[i] == end
        if joins_right:
            end = self._ends[i]
            del self._begins[i], self._ends[i]
        if joins_left:
            self._ends[i - 1] = end
        else:
            self._begins.insert(i, begin)
            self._ends.insert(i, end)


class PageLock(Protocol):
    """Keeps pages in place."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Raises MemoryError where the system refuses."""
        ...

    def unlock(self, address: int) -> None: ...


class DevicePageLock:
    """Registers memory with the driver of a GPU, of any vendor that torch is built for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, num_bytes: int) -> None:
        """See PageLock."""
        with torch.cuda.device(self._device):
            result = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, PORTABLE))
        if result:
            raise MemoryError(f"the driver pins no {num_bytes >> 20} MiB more: error {result}")

    def unlock(self, address: int) -> None:
        """See PageLock."""
        with torch.cuda.device(self._device):
            result = int(torch.cuda.cudart().cudaHostUnregister(address))
        assert result == 0, f"cudaHostUnregister: error {result}"


class PinnedArena:
    """Memory that GPUs copy from and to on their own, given out from one range of addresses.

    The first slab is there at once; a thread adds the others, so that nobody waits for pages. A
    region that is too large for what is pinned so far is refused, as one that finds no room is.
    """

    def __init__(self, capacity_bytes: int, pages: PageLock, slab_bytes: int = SLAB_BYTES) -> None:
        """`slab_bytes`: a multiple of PIECE_BYTES. Raises MemoryError if nothing can be pinned."""
        assert slab_bytes % PIECE_BYTES == 0, f"{slab_bytes} is no multiple of {PIECE_BYTES}"
        self._pages = pages
        self._area = np.frombuffer(_map(capacity_bytes + PIECE_BYTES), np.uint8)
        address = self._area.ctypes.data
        first = address + -address % PIECE_BYTES
        last = first + capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._origin = address
        self._slabs = [(a, min(a + slab_bytes, last)) for a in range(first, last, slab_bytes)]
        self._locked: list[int] = []
        self._holes = Holes()
        # Views go away in any thread, also while this one holds the lock: they only leave a note.
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._add(*self._slabs[0])
        self._thread = threading.Thread(target=self._add_others, name="pin", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"PinnedArena({len(self._locked)} of {len(self._slabs)} slabs)"

    @property
    def free_bytes(self) -> int:
        """Bytes that are pinned and in nobody's use, in whatever pieces."""
        with self._lock:
            self._take_back()
            return self._holes.num_bytes

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything that can be pinned is; whether that came in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def allocate(self, num_bytes: int) -> memoryview:
        """See HostMemory."""
        assert num_bytes > 0, f"a region of {num_bytes} bytes"
        room = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._lock:
            self._take_back()
            address = None if self._closing.is_set() else self._holes.take(room)
        if address is None:
            raise MemoryError(f"no room for {num_bytes} bytes in pinned memory")
        region = np.frombuffer(self._area.data, np.uint8, num_bytes, address - self._origin)
        going = weakref.finalize(region, self._returned.append, (address, address + room))
        going.atexit = False
        return memoryview(region)

    def close(self) -> None:
        """See HostMemory. No copy may be under way any more."""
        self._closing.set()
        self._thread.join()
        while self._locked:
            self._pages.unlock(self._locked.pop())

    def _take_back(self) -> None:
        while self._returned:
            self._holes.give(*self._returned.popleft())

    def _add_others(self) -> None:
        for slab in self._slabs[1:]:
            if self._closing.is_set():
                return
            try:
                self._add(*slab)
            except MemoryError as error:
                log.warning("pinned %d of %d slabs: %s", len(self._locked), len(self._slabs), error)
                return

    def _add(self, begin: int, end: int) -> None:
        """Pin a slab. Its pages are made first: what the driver does holds up its other callers."""
        self._area[begin - self._origin : end - self._origin : mmap.PAGESIZE] = 0
        self._pages.lock(begin, end - begin)
        self._locked.append(begin)
        with self._lock:
            self._holes.give(begin, end)


def _map(num_bytes: int) -> mmap.mmap:
    """Fresh memory, in huge pages where there are any. Raises MemoryError."""
    whole_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        area = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.resize(num_bytes)
    except OSError as error:
        raise MemoryError(f"no room for {num_bytes} bytes: {error.strerror}") from None
    with contextlib.suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return area
