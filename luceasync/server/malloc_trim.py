"""When memory that was freed goes back to the system: in a moment, and beside the loop.

Owns that moment. Knows nothing of what was freed.
"""

from __future__ import annotations

import asyncio

from luceasync.process_memory import give_back_freed_memory, resident_bytes

GIVE_BACK_S = 1.0
LOOK_S = 2.0
CHANGED_BYTES = 16 << 20  # less of it serves what comes next faster than fresh memory would


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


class Change:
    """Whether a process has grown or shrunk by CHANGED_BYTES since it gave memory back: then there
    may be holes between what it uses.
    """

    def __init__(self) -> None:
        self._then_bytes = 0

    def is_large(self, now_bytes: int) -> bool:
        """It has `now_bytes` of memory."""
        return abs(now_bytes - self._then_bytes) >= CHANGED_BYTES

    def gave_back(self, now_bytes: int) -> None:
        """What it could, and has `now_bytes` still: those it uses."""
        self._then_bytes = now_bytes


async def give_back_what_was_freed() -> None:
    """Until cancelled: many small blocks that nobody asks about leave holes as large ones do."""
    change = Change()
    while True:
        await asyncio.sleep(LOOK_S)
        if change.is_large(resident_bytes()):
            await asyncio.to_thread(give_back_freed_memory)
            change.gave_back(resident_bytes())
