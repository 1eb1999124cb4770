"""What the engine says to lanes of which a part may be on no device, and what it asks of them.

Knows no pages: luceasync.pipeline.paging has both bodies, and here is one for targets without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from luceasync.request import Residence
from luceasync.status import ResidenceStatus


class Lanes(Protocol):
    """Lanes by number. Engine thread only."""

    def pin(self, lane: int, spans: Sequence[tuple[int, int]]) -> None:
        """Have tokens `[begin, end)` of an empty lane stay on the devices."""
        ...

    def vacate(self, lane: int) -> None:
        """Nobody needs what is in the lane any more."""
        ...

    def told(self, lane: int) -> Residence | None:
        """What there is to be told of the lane; None where all of it is always here."""
        ...

    @property
    def status(self) -> ResidenceStatus | None:
        """The same of all lanes, since the start; may be read from any thread."""
        ...


class AllHere:
    """Lanes that hold all that they stand for."""

    def pin(self, lane: int, spans: Sequence[tuple[int, int]]) -> None:
        """Everything stays."""

    def vacate(self, lane: int) -> None:
        """It stays until somebody comes."""

    def told(self, lane: int) -> None:
        return None

    @property
    def status(self) -> None:
        return None


ALL_HERE = AllHere()
