"""Whether requests can be taken, and the words where they cannot.

Owns what is still awaited, the last fault, and what keeps requests out for now. Knows neither the
model nor the cache directory; event loop only.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable

from luceasync.errors import Unavailable

MAX_LOADING_S = 60  # that clients are told to come back in


class Availability:
    """Not ready until every part is there, nor after a fault, nor from `interrupt` to `resume`."""

    def __init__(self, parts: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._back_s: float | None = None  # when what is interrupted may go on
        self._awaited = set(parts)
        self._arrivals: dict[str, asyncio.Future[None]] = {}
        self._fault = ""
        self._interruption = ""

    @property
    def is_ready(self) -> bool:
        return not self._awaited and not self._fault and not self._interruption

    @property
    def is_interrupted(self) -> bool:
        """Whether what was there has failed and is not back."""
        return bool(self._interruption)

    @property
    def detail(self) -> str:
        """Why not, or "ready"."""
        awaited = "loading the model" if self._awaited else "ready"
        return self._fault or self._interruption or awaited

    @property
    def retry_after_s(self) -> int:
        """In how many seconds whoever is refused may come back: what is left of what was said at an
        interruption; of a first load, whose time nobody knows, as long as it takes by now.
        """
        now_s = self._clock()
        if self._back_s is not None:
            return max(1, math.ceil(self._back_s - now_s))
        loading_s = round(now_s - self._begun_s) if self._awaited else 1
        return max(1, min(MAX_LOADING_S, loading_s))

    def begin(self) -> None:
        """The parts are on their way; called on the event loop."""
        self._begun_s = self._clock()
        loop = asyncio.get_running_loop()
        self._arrivals = {part: loop.create_future() for part in self._awaited}

    async def wait(self) -> None:
        """Until every part is there. Raises what kept one of them away, at once."""
        assert self._arrivals, "`begin` comes first"
        await asyncio.gather(*map(asyncio.shield, self._arrivals.values()))

    def has_come(self, part: str) -> bool:
        """Whether it is known what became of the part."""
        return self._arrivals[part].done()

    def arrived(self, part: str) -> None:
        """The part is there."""
        self._arrivals[part].set_result(None)
        self._awaited.discard(part)

    def lost(self, part: str, error: BaseException) -> None:
        """The part will never be there."""
        self._fault = str(error)
        self._arrivals[part].set_exception(error)

    def interrupt(self, words: str, back_in_s: int) -> None:
        """No request is taken for now; it may be otherwise in so many seconds."""
        self._interruption, self._back_s = words, self._clock() + back_in_s

    def resume(self) -> None:
        """What was interrupted goes on."""
        self._interruption, self._back_s = "", None

    def stop(self, words: str) -> None:
        """No request is taken any more."""
        self._fault = words


def unavailable(detail: str, retry_after_s: int) -> Unavailable:
    """What a request is told that cannot be taken."""
    return Unavailable(f"The model is not available: {detail}.", retry_after_s)
