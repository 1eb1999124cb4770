"""Host memory whose pages exist before they are needed and, with GPUs, are locked so that the
device can copy them.

Owns the layout of regions and the locked pages. Does not know nodes, tensors or files.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import psutil
import torch

# Systems align a mapping of whole huge pages so that huge pages can be used.
HUGE_PAGE_BYTES = 2 << 20
NODE_MEMORY_SHARE = 4  # by default, one part in this many of the free memory holds nodes
ALIGNMENT_BYTES = 4096  # required by direct file access
# A device copies host memory in pieces that cross no multiple of this: two ranges that were
# registered separately cannot be copied as one, and small copies of other streams get in between.
PIECE_BYTES = 8 << 20
SLAB_BYTES = 8 * PIECE_BYTES  # requests that arrive during this wait for the driver: some 25 ms
SPARE_BYTES = 4 << 30  # with this much free, more is added only while nothing runs
QUIET_POLL_S = 0.1
SOON_S, SOON_POLL_S = 1.0, 0.003  # how long to wait for pages; a slab takes 15 ms
WARM_SLAB_BYTES = 4 * PIECE_BYTES  # the first slab is waited for
TOUCHED_BYTES, NUM_TOUCHERS = 32 << 20, 8  # at once, of memory that is locked as a whole
CLOSE_TIMEOUT_S = 30.0  # for one slab: a driver pins 3 GB a second
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only for the current one

log = logging.getLogger(__name__)


class Holes:
    """The free parts of a range of bytes, sorted; adjacent ones are merged."""

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
        """Take bytes from the first hole that is large enough: returns where they begin, or
        None."""
        for i, (begin, end) in enumerate(self):
            if end - begin >= num_bytes:
                self._begins[i] += num_bytes
                if self._begins[i] == end:
                    del self._begins[i], self._ends[i]
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        """Free `[begin, end)`, which was in use."""
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


def node_bytes_of(asked_bytes: int | None) -> int:
    """How much memory holds nodes: the requested size, or by default a share of what is free
    now."""
    if asked_bytes is not None:
        return asked_bytes
    return psutil.virtual_memory().available // NODE_MEMORY_SHARE


class HostMemory(Protocol):
    """Memory for nodes. Any thread may allocate."""

    def allocate(self, num_bytes: int) -> memoryview:
        """Writable bytes, at least 1, aligned to a page and with arbitrary content. They are freed
        with the last memoryview, array or tensor over them. Raises MemoryError."""
        ...

    def allocate_soon(self, num_bytes: int) -> memoryview:
        """`allocate`, for threads that may wait a little for memory that is being prepared. Raises
        MemoryError."""
        ...

    def close(self) -> None:
        """Allocate no more. Regions stay until their last view goes. Idempotent."""
        ...


class PlainMemory:
    """Memory in which each region is a separate mapping."""

    def allocate(self, num_bytes: int) -> memoryview:
        return memoryview(map_pages(num_bytes))

    def allocate_soon(self, num_bytes: int) -> memoryview:
        return self.allocate(num_bytes)

    def close(self) -> None:
        """Nothing is held."""


def map_pages(num_bytes: int) -> mmap.mmap:
    """Fresh memory, in huge pages if available. Raises MemoryError."""
    whole_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        area = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.resize(num_bytes)
    except OSError as error:
        raise MemoryError(f"no room for {num_bytes} bytes: {error.strerror}") from None
    except OverflowError:
        raise MemoryError(f"no room for {num_bytes} bytes: more than can be addressed") from None
    with contextlib.suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


class PageLock(Protocol):
    """Keeps pages in place."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Raises MemoryError if the system refuses."""
        ...

    def unlock(self, address: int) -> None: ...


class DevicePageLock:
    """Registers memory with the driver of a GPU, of any vendor that torch is built for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, num_bytes: int) -> None:
        with torch.cuda.device(self._device):
            result = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, PORTABLE))
        if result:
            raise MemoryError(f"the driver cannot pin {num_bytes >> 20} MiB more: error {result}")

    def unlock(self, address: int) -> None:
        with torch.cuda.device(self._device):
            result = int(torch.cuda.cudart().cudaHostUnregister(address))
        assert result == 0, f"cudaHostUnregister: error {result}"


class NoPageLock:
    """For memory that no device copies: its pages need only exist."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Nothing to lock."""

    def unlock(self, address: int) -> None:
        """Nothing to unlock."""


def _touch(area: np.ndarray) -> None:
    """Have the system provide all pages, in many threads: a driver would use one."""
    begins = range(0, len(area), TOUCHED_BYTES)
    with ThreadPoolExecutor(NUM_TOUCHERS, "touch-pages") as threads:
        for _ in threads.map(
            lambda begin: area[begin : begin + TOUCHED_BYTES : 4096].fill(0), begins
        ):
            pass


def locked_pages(num_bytes: int, pages: PageLock) -> np.ndarray:
    """Bytes whose pages stay locked until the last array or tensor over them is gone. Raises
    MemoryError."""
    area = np.frombuffer(map_pages(num_bytes), np.uint8)
    _touch(area)
    address = area.ctypes.data
    pages.lock(address, num_bytes)
    weakref.finalize(area, pages.unlock, address).atexit = False
    return area


class LockedAhead:
    """`locked_pages` for sizes that are needed repeatedly: once one is taken, a thread prepares the
    next one of its size."""

    def __init__(self, pages: PageLock) -> None:
        self._pages = pages
        self._thread = ThreadPoolExecutor(1, "lock-pages")
        self._coming: dict[int, Future[np.ndarray]] = {}

    def take(self, num_bytes: int) -> np.ndarray:
        """Bytes, see locked_pages. Raises MemoryError."""
        coming = self._coming.pop(num_bytes, None)
        area = locked_pages(num_bytes, self._pages) if coming is None else coming.result()
        self._coming[num_bytes] = self._thread.submit(locked_pages, num_bytes, self._pages)
        return area

    def close(self) -> None:
        """Stop preparing, and free what was prepared."""
        self._thread.shutdown(cancel_futures=True)
        self._coming.clear()


class Arena:
    """Memory in one range of addresses whose pages exist and are locked, so that GPUs can copy from
    and to it.

    The first slab exists at once; a thread adds the others, so that allocations need not wait for
    pages. A region that does not fit into the slabs so far is refused.
    """

    def __init__(
        self,
        capacity_bytes: int,
        pages: PageLock,
        slab_bytes: int = SLAB_BYTES,
        quiet: threading.Event | None = None,
        spare_bytes: int = SPARE_BYTES,
        mapping: mmap.mmap | None = None,
    ) -> None:
        """`slab_bytes`: a multiple of PIECE_BYTES. `quiet` is set while the driver may be busy:
        while it is not, slabs are added until `spare_bytes` are free, and again when half of them
        are used or an allocation was refused. `mapping`: memory of `capacity_bytes` that other
        processes map too, and that outlives their views of it; regions lie in it at `offset_of`.
        None: private memory. Raises MemoryError if nothing can be locked."""
        assert slab_bytes % PIECE_BYTES == 0, f"{slab_bytes} is no multiple of {PIECE_BYTES}"
        self._quiet = quiet
        self._spare_bytes = spare_bytes
        self._pages = pages
        self._slab_bytes = slab_bytes
        own = mapping is None
        self._mapping = map_pages(capacity_bytes + PIECE_BYTES) if mapping is None else mapping
        self._area = np.frombuffer(self._mapping, np.uint8)
        address = self._area.ctypes.data
        first = address + -address % PIECE_BYTES if own else address
        last = first + capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._origin = address
        # Copies stop at multiples of PIECE_BYTES (see copy_stream), and so do slabs.
        borders = range(first - first % PIECE_BYTES, last, slab_bytes)
        self._slabs = [(max(a, first), min(a + slab_bytes, last)) for a in borders]
        self._locked: list[int] = []
        self._holes = Holes()
        # Views may be freed in any thread, even while this one holds the lock: they are queued
        # here.
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._is_complete = threading.Event()  # no more slabs are added
        self._is_closed = False
        self._num_refused = 0
        self._add(*self._slabs[0])
        self._thread = threading.Thread(target=self._add_others, name="pages", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Arena({len(self._locked)} of {len(self._slabs)} slabs)"

    @property
    def free_bytes(self) -> int:
        """Bytes that exist and are not in use, even if fragmented."""
        with self._lock:
            self._take_back()
            return self._holes.num_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are in use. May be called from any thread."""
        with self._lock:
            self._take_back()
            there = sum(end - begin for begin, end in self._slabs[: len(self._locked)])
            return there - self._holes.num_bytes

    def wait(self, timeout_s: float) -> bool:
        """Wait until all pages exist; returns whether they do in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def allocate(self, num_bytes: int) -> memoryview:
        assert num_bytes > 0, f"a region of {num_bytes} bytes"
        room = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._lock:
            self._take_back()
            address = None if self._is_closed else self._holes.take(room)
            self._num_refused += address is None
        if address is None:
            raise MemoryError(f"no room for {num_bytes} bytes in prepared memory")
        region = np.frombuffer(self._area.data, np.uint8, num_bytes, address - self._origin)
        going = weakref.finalize(region, self._returned.append, (address, address + room))
        going.atexit = False
        return region.data

    def allocate_soon(self, num_bytes: int) -> memoryview:
        deadline_s = time.monotonic() + SOON_S
        while True:
            is_growing = self._thread.is_alive() and not self._is_complete.is_set()
            try:
                return self.allocate(num_bytes)
            except MemoryError:
                if not is_growing or time.monotonic() >= deadline_s:
                    raise
            self._is_complete.wait(SOON_POLL_S)

    def offset_of(self, region: memoryview) -> int:
        """The offset of a region, or of any view of one: the same in every process."""
        offset = int(np.frombuffer(region, np.uint8).ctypes.data) - self._origin
        assert 0 <= offset < len(self._area), "the region is not from this memory"
        return offset

    def give_up_pages(self) -> None:
        """Return the pages of free memory to the system, which provides new ones on use, and add no
        more slabs."""
        self._is_complete.set()
        with self._lock:
            self._take_back()
            for begin, end in self._holes:
                self._mapping.madvise(mmap.MADV_DONTNEED, begin - self._origin, end - begin)

    def close(self) -> None:
        """Stop allocating, and unlock the pages. No copy may be in progress. Raises TimeoutError if
        the thread does not end within CLOSE_TIMEOUT_S; everything stays locked then."""
        self._is_complete.set()
        with self._lock:
            self._is_closed = True
        if not self.wait(CLOSE_TIMEOUT_S):
            raise TimeoutError(
                f"the system has not locked {self._slab_bytes >> 20} MiB of memory within "
                f"{CLOSE_TIMEOUT_S:g} s: giving up"
            )
        while self._locked:
            self._pages.unlock(self._locked.pop())

    def _take_back(self) -> None:
        while self._returned:
            self._holes.give(*self._returned.popleft())

    def _add_others(self) -> None:
        for slab in self._slabs[1:]:
            if self.free_bytes >= self._spare_bytes:
                self._wait_for_quiet()
            if self._is_complete.is_set():
                return
            try:
                self._add(*slab)
            except MemoryError as error:
                log.warning("locked %d of %d slabs: %s", len(self._locked), len(self._slabs), error)
                return

    def _wait_for_quiet(self) -> None:
        """Wait until nothing runs, half of the spare memory is used, or an allocation fails."""
        num_refused = self._num_refused
        while (
            self._quiet is not None
            and not self._quiet.is_set()
            and self.free_bytes > self._spare_bytes // 2
            and self._num_refused == num_refused
            and not self._is_complete.wait(QUIET_POLL_S)
        ):
            pass

    def _add(self, begin: int, end: int) -> None:
        """Lock a slab. Its pages are touched first: a driver that has to create them blocks other
        callers."""
        self._area[begin - self._origin : end - self._origin : mmap.PAGESIZE] = 0
        self._pages.lock(begin, end - begin)
        self._locked.append(begin)
        with self._lock:
            self._holes.give(begin, end)


class WarmMemory:
    """Memory part of which has its pages before they are used; the rest is PlainMemory.

    The first touch of memory costs more than a read from the page cache. Freed memory keeps its
    pages as long as the total stays within `capacity_bytes`.
    """

    def __init__(self, warm_bytes: int, capacity_bytes: int) -> None:
        """A thread touches the pages of `warm_bytes`, more than 0."""
        assert 0 < warm_bytes <= capacity_bytes, f"{warm_bytes} of {capacity_bytes} bytes"
        self._capacity_bytes = capacity_bytes
        # Whole huge pages, with a little room for the padding of regions.
        self._warm_bytes = -(-warm_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._arena = Arena(self._warm_bytes, NoPageLock(), WARM_SLAB_BYTES)
        self._plain = PlainMemory()
        self._plain_bytes = 0  # in use
        self._returned: deque[int] = deque()  # views may be freed in any thread, at any moment
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"WarmMemory({self._arena}, {self._plain_bytes} bytes beside it)"

    def wait(self, timeout_s: float) -> bool:
        """Wait until the warm part has all its pages; returns whether it does in time."""
        return self._arena.wait(timeout_s)

    def allocate(self, num_bytes: int) -> memoryview:
        try:
            return self._arena.allocate(num_bytes)
        except MemoryError:
            region = self._plain.allocate(num_bytes)
        with self._lock:
            while self._returned:
                self._plain_bytes -= self._returned.popleft()
            self._plain_bytes += num_bytes
            is_full = self._warm_bytes + self._plain_bytes > self._capacity_bytes
        weakref.finalize(region.obj, self._returned.append, num_bytes).atexit = False
        if is_full:  # unused pages would exceed the capacity
            self._arena.give_up_pages()
        return region

    def allocate_soon(self, num_bytes: int) -> memoryview:
        return self.allocate(num_bytes)

    def close(self) -> None:
        self._arena.close()
