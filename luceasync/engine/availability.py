"""Whether requests can be taken, and the words where they cannot.

Owns what is still awaited, the last fault, and what keeps requests out for now. Knows neither the
model nor the cache directory; event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Availability:
    """Not ready until every part is there, nor after a fault, nor from `interrupt` to `resume`."""

    def __init__(self, parts: Iterable[str]) -> None:
        self._awaited = set(parts)
        self._arrivals: dict[str, asyncio.Future[None]] = {}
        self._fault = ""
        self._interruption = ""
        self.retry_after_s = 1  # when whoever is refused may come back

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

    def begin(self) -> None:
        """The parts are on their way; called on the event loop."""
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
        self._interruption, self.retry_after_s = words, back_in_s

    def resume(self) -> None:
        """What was interrupted goes on."""
        self._interruption, self.retry_after_s = "", 1

    def stop(self, words: str) -> None:
        """No request is taken any more."""
        self._fault = words
