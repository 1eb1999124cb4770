"""Host memory that holds nodes: bytes that go back when the last view of them is gone.

Owns what memory is asked for, and how a system gives it. Knows no node, no tensor and no file.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol

import psutil

HUGE_PAGE_BYTES = 2 << 20  # systems place a mapping of whole ones so that it can have them


SHARE = 4  # of the memory that is free one part holds nodes, where nobody names how much


def node_bytes_of(asked_bytes: int | None) -> int:
    """How much memory holds nodes: what is asked for, else a part of what is free now."""
    return psutil.virtual_memory().available // SHARE if asked_bytes is None else asked_bytes


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
        return memoryview(map_pages(num_bytes))

    def close(self) -> None:
        """Nothing is held."""


def map_pages(num_bytes: int) -> mmap.mmap:
    """Fresh memory, in huge pages where there are any. Raises MemoryError."""
    whole_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        area = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.resize(num_bytes)
    except OSError as error:
        raise MemoryError(f"no room for {num_bytes} bytes: {error.strerror}") from None
    except OverflowError:
        raise MemoryError(f"no room for {num_bytes} bytes: no system counts so many") from None
    with contextlib.suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return area
