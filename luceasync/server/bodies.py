"""How much memory the bodies of requests take that have not begun, all together.

Owns the sum. Knows nothing of sockets, nor of what a body says.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from luceasync.errors import Unavailable
from luceasync.server.giving_back import GivingBack

MAX_BODIES_BYTES = 128 << 20
SMALL_BYTES = 256 << 10  # of each body that are not counted: small ones always get through
LARGE_BYTES = 4 << 20  # after which memory is given back


class Bodies:
    """Each body holds its bytes until its request is with the engine; event loop only."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.giving_back = GivingBack()
        self.parsing = asyncio.Lock()  # of large ones, each of which has the interpreter for long

    def __repr__(self) -> str:
        return f"Bodies({self._num_bytes} of {self._max_bytes} bytes)"

    def hold(self) -> Held:
        """Room for one body, which holds nothing yet."""
        return Held(self)

    def grow(self, held_bytes: int, more_bytes: int) -> None:
        """A body of `held_bytes` counted bytes gets `more_bytes`. Raises Unavailable where there is
        no room for them beside the others; one alone always has room.
        """
        others_bytes = self._num_bytes - held_bytes
        if others_bytes and self._num_bytes + more_bytes > self._max_bytes:
            raise Unavailable(
                "The server is busy: the bodies of other requests fill the "
                f"{self._max_bytes} bytes that there are for them."
            )
        self._num_bytes += more_bytes

    def shrink(self, num_bytes: int) -> None:
        """A body let go of its counted bytes."""
        self._num_bytes -= num_bytes


class Held:
    """What one body holds; all of it is let go of at the end of the `with`, or before."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._counted_bytes = 0
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def grow(self, num_bytes: int) -> None:
        """So many more bytes have come. Raises Unavailable."""
        self._num_bytes += num_bytes
        more_bytes = max(0, self._num_bytes - SMALL_BYTES) - self._counted_bytes
        self._bodies.grow(self._counted_bytes, more_bytes)
        self._counted_bytes += more_bytes

    def release(self) -> None:
        """Nothing is held any more."""
        self._bodies.shrink(self._counted_bytes)
        if self._num_bytes >= LARGE_BYTES:
            self._bodies.giving_back.ask()
        self._counted_bytes = self._num_bytes = 0
