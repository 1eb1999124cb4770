"""Memory in large pages, where the system gives them: it is read faster from end to end, since its
addresses are looked up less often. Knows no allocation of ours.
"""

from __future__ import annotations

import ctypes

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
