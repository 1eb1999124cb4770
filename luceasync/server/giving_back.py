"""When memory that was freed goes back to the system: in a moment, and beside the loop.

Owns that moment. Knows nothing of what was freed.
"""

from __future__ import annotations

import asyncio

from luceasync.freed_memory import give_back_freed_memory, resident_bytes

GIVE_BACK_S = 1.0
LOOK_S = 2.0
GROWN_BYTES = 32 << 20  # less of it serves what comes next faster than fresh memory would


class GivingBack:
    """Once for all who ask within a second: who allocates meanwhile waits for it."""

    def __init__(self) -> None:
        self._is_asked = False

    def ask(self) -> None:
        """Something large was let go of, or will be in a moment: whoever asks may still have it at
        hand.
        """
        if not self._is_asked:
            self._is_asked = True
            asyncio.get_running_loop().call_later(GIVE_BACK_S, self._begin)

    def _begin(self) -> None:
        self._is_asked = False
        asyncio.get_running_loop().run_in_executor(None, give_back_freed_memory)


class Growth:
    """Whether a process has grown by GROWN_BYTES since it was smallest, or gave memory back."""

    def __init__(self) -> None:
        self._least_bytes: int | None = None

    def has_grown(self, now_bytes: int) -> bool:
        """It has `now_bytes` of memory."""
        if self._least_bytes is None or now_bytes < self._least_bytes:
            self._least_bytes = now_bytes
        return now_bytes >= self._least_bytes + GROWN_BYTES

    def gave_back(self, now_bytes: int) -> None:
        """What it could, and has `now_bytes` still: those it uses."""
        self._least_bytes = now_bytes


async def give_back_what_grows() -> None:
    """Until cancelled: many small blocks that nobody asks about leave holes as large ones do."""
    growth = Growth()
    while True:
        await asyncio.sleep(LOOK_S)
        if growth.has_grown(resident_bytes()):
            await asyncio.to_thread(give_back_freed_memory)
            growth.gave_back(resident_bytes())
