"""How much memory the bodies of requests take that have not begun, all together.

Owns the sum. Knows nothing of sockets, nor of what a body says.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from luceasync.errors import Unavailable
from luceasync.freed_memory import give_back_freed_memory

MAX_BODIES_BYTES = 128 << 20
SMALL_BYTES = 256 << 10  # of each body that are not counted: small ones always get through
LARGE_BYTES = 4 << 20  # after which memory is given back
GIVE_BACK_S = 1.0


class Bodies:
    """Each body holds its bytes until its request is with the engine; event loop only."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._is_giving_back = False
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

    def give_back(self) -> None:
        """Give freed memory back to the system: once for all who ask within a second, since who
        allocates meanwhile waits for it.
        """
        if not self._is_giving_back:
            self._is_giving_back = True
            # In a moment, and beside the loop: whoever releases may still have the body at hand.
            asyncio.get_running_loop().call_later(GIVE_BACK_S, self._begin_to_give_back)

    def _begin_to_give_back(self) -> None:
        self._is_giving_back = False
        asyncio.get_running_loop().run_in_executor(None, give_back_freed_memory)


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
            self._bodies.give_back()
        self._counted_bytes = self._num_bytes = 0
