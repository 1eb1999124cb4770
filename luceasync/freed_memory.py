"""Memory that was freed goes back to the system after something large.

Knows no allocation of ours: the C library keeps what was freed, and is asked to let go of it.
"""

from __future__ import annotations

import ctypes


def give_back_freed_memory() -> None:
    """Let the system have what the process has freed; takes milliseconds, and lets threads run.

    Nothing is done where the C library has no word for it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
