"""Returns freed memory to the system, off the event loop, some time after it was freed."""

from __future__ import annotations

import asyncio

from luceasync.process_memory import resident_bytes, trim_heap

TRIM_DELAY_S = 1.0
CHECK_INTERVAL_S = 2.0
CHANGED_BYTES = 16 << 20  # below this, keeping pages is faster than requesting fresh ones


class MallocTrim:
    """Trims once for all requests within TRIM_DELAY_S, since allocations wait for a trim."""

    def __init__(self) -> None:
        self._is_scheduled = False

    def schedule(self) -> None:
        """Trim soon. The caller may still hold the objects that it is about to free."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._begin)

    def _begin(self) -> None:
        self._is_scheduled = False
        asyncio.get_running_loop().run_in_executor(None, trim_heap)


class ResidentChange:
    """Detects that the process has grown or shrunk by CHANGED_BYTES since its last trim: there may
    then be free pages between those in use.
    """

    def __init__(self) -> None:
        self._trimmed_bytes = 0

    def is_large(self, resident: int) -> bool:
        """Whether `resident` bytes differ by CHANGED_BYTES from the size after the last trim."""
        return abs(resident - self._trimmed_bytes) >= CHANGED_BYTES

    def trimmed(self, resident: int) -> None:
        """Record that `resident` bytes are left after a trim."""
        self._trimmed_bytes = resident


async def trim_periodically() -> None:
    """Trim whenever the resident size has changed much, until cancelled. Many small blocks, for
    which `schedule` is not called, fragment the heap as large ones do.
    """
    change = ResidentChange()
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        if change.is_large(resident_bytes()):
            await asyncio.to_thread(trim_heap)
            change.trimmed(resident_bytes())
