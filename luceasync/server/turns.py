"""Work that many ask for at once, spread over the turns of the event loop.

Owns the order: first come, first served, one at each turn. Knows nothing of the work.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Whoever has much to do waits for `take` first: others then never wait for more than one."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def take(self) -> None:
        """Return at a turn of the loop at which nobody else does."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn)
        await turn

    def _turn(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # who waits may have been cancelled
                turn.set_result(None)
                break
        self._is_turning = bool(self._waiting)
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
