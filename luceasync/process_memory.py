"""Memory that was freed goes back to the system: large blocks at once, the rest when asked for.

Knows no allocation of ours: the C library keeps what was freed, and is asked to let go of it.
"""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt(3)
LARGE_BLOCK_BYTES = 1 << 20
KEPT_AT_THE_TOP_BYTES = 8 << 20


def keep_large_blocks_apart() -> None:
    """From now on a block of LARGE_BLOCK_BYTES or more has pages of its own, which go back with it.

    Else the C library puts all below 32 MiB between small ones as soon as one as large was freed,
    and what a body of 15 MB leaves is a hole that some small block keeps open.
    """
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(TRIM_THRESHOLD, KEPT_AT_THE_TOP_BYTES)


def give_back_freed_memory() -> None:
    """Let the system have what the process has freed; takes milliseconds, and lets threads run.

    Nothing is done where the C library has no word for it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """What the process has of the machine's memory; 0 where the system does not tell."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")


# What is loaded stays as long as the process: garbage collections need not look through it.


def freeze_heap() -> None:
    """Leave what is there now out of later garbage collections: looking through it would hold up
    every answer for a tenth of a second now and then.
    """
    gc.collect()
    gc.freeze()


# Memory in large pages, where the system gives them: it is read faster from end to end, since
# its addresses are looked up less often. Knows no allocation of ours.


LARGE_PAGE_BYTES = 2 << 20
COLLAPSE = 25  # of madvise(2), from Linux 6.1 on


def into_large_pages(address: int, num_bytes: int) -> None:
    """Have pages put together that hold these bytes, which have been written. The first and the
    last are shared with what lies beside them, as tensors of a model do. It is advice: nothing
    happens where the system knows no such word, or has no large page to give.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = address // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    for page in range(begin, address + num_bytes, LARGE_PAGE_BYTES):
        madvise(page, LARGE_PAGE_BYTES, COLLAPSE)
