"""Reads for which nobody waits any more and which have not come back: while there are such, the
disk hangs, and nobody is to wait for another.

Owns those calls. Knows no file; event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class HungReads:
    """True while one has not come back; they are the probe, so that no other is needed."""

    def __init__(self, came_back: Callable[[str], None]) -> None:
        """`came_back` hears the fault of the first one that does, "" where it has none."""
        self._came_back = came_back
        self._calls: set[asyncio.Future[Any]] = set()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def leave(self, call: asyncio.Future[Any]) -> None:
        """Nobody waits for `call` any more."""
        self._calls.add(call)
        call.add_done_callback(self._end)

    def _end(self, call: asyncio.Future[Any]) -> None:
        fault = None if call.cancelled() else call.exception()
        if call in self._calls:
            # The disk answers: what else it still owes tells nothing new.
            self._calls.clear()
            self._came_back(str(fault) if isinstance(fault, OSError) else "")
