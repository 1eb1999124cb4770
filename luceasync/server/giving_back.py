"""When memory that was freed goes back to the system: in a moment, and beside the loop.

Owns that moment. Knows nothing of what was freed.
"""

from __future__ import annotations

import asyncio

from luceasync.freed_memory import give_back_freed_memory

GIVE_BACK_S = 1.0


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
