"""The memory of this process: what the C library returns to the system, what the garbage collector
scans, and what is in large pages.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt(3)
LARGE_BLOCK_BYTES = 1 << 20
KEPT_AT_THE_TOP_BYTES = 8 << 20
LARGE_PAGE_BYTES = 2 << 20
HUGE_PAGE = 14  # of madvise(2)
COLLAPSE = 25  # of madvise(2), from Linux 6.1 on


def keep_large_blocks_apart() -> None:
    """Put every block of LARGE_BLOCK_BYTES or more into separate pages, which are returned to the
    system when the block is freed.

    Otherwise, once a block of up to 32 MiB has been freed, the C library places blocks of that size
    among small ones, and a request body of 15 MB leaves a hole that some small block keeps mapped.
    """
    with suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(TRIM_THRESHOLD, KEPT_AT_THE_TOP_BYTES)


def trim_heap() -> None:
    """Return freed memory to the system; takes milliseconds, without the GIL.

    Does nothing if the C library has no malloc_trim.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """The resident memory of this process; 0 if the system does not report it."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Disable garbage collection within the context, which imports modules, and exclude these from
    later collections: collections take a sixth of the time of importing torch, and find nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def freeze_heap() -> None:
    """Exclude all current objects from later garbage collections: they live as long as the process,
    and scanning them would occasionally delay an answer by a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def want_large_pages(address: int, num_bytes: int) -> None:
    """Ask the system for large pages where these bytes are first written: that takes a tenth of the
    time of collapsing pages that have been written. A hint, like `into_large_pages`.
    """
    madvise = _madvise()
    begin = -(-address // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    end = (address + num_bytes) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if madvise is not None and begin < end:
        madvise(begin, end - begin, HUGE_PAGE)


def into_large_pages(address: int, num_bytes: int) -> None:
    """Collapse the pages of these bytes, which must have been written, into large pages: reading
    them from end to end is faster with fewer address lookups.

    The first and last page may be shared with adjacent memory, as with a model's tensors. This is a
    hint: nothing happens if the system does not support it or has no large page free.
    """
    madvise = _madvise()
    if madvise is None:
        return
    begin = address // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    for page in range(begin, address + num_bytes, LARGE_PAGE_BYTES):
        madvise(page, LARGE_PAGE_BYTES, COLLAPSE)


def _madvise() -> Callable[[int, int, int], int] | None:
    """madvise(2); None if the system does not have it."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
