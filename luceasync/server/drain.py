"""Which requests run, and how they end when the server has to.

Owns the count of running requests and the two moments of a shutdown. Knows nothing of signals or
sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from luceasync.errors import Unavailable


class Drain:
    """Lets requests in until `begin`; `expire` tells those that still run to stop."""

    def __init__(self) -> None:
        self.closing = False
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._expired = asyncio.Event()

    def __repr__(self) -> str:
        return f"Drain(num_running={self.num_running}, closing={self.closing})"

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place among the running requests. Raises Unavailable once closing."""
        if self.closing:
            raise Unavailable("The server is shutting down.")
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self._idle.set()

    async def expired(self) -> NoReturn:
        """Wait until running requests have to stop. Raises Unavailable then."""
        await self._expired.wait()
        raise Unavailable("The server shut down before the answer was complete.")

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.closing = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs, at most `timeout_s`; tell whether it came to that."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def expire(self) -> None:
        """Tell the requests that still run to stop."""
        self._expired.set()
