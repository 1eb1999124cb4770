"""Bytes between a lane and host memory: what is asked of any device, and the CPU's body.

Knows no node: it is told which bytes go where. Engine thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from luceasync.cyext.flatten import fill
from luceasync.hoststore.copy_stream import Pair
from luceasync.kv.cache import LaneCache


class Arrival(Protocol):
    """The end of copies that were queued."""

    def query(self) -> bool:
        """Whether they have arrived."""
        ...

    def synchronize(self) -> None:
        """Wait until they have arrived."""
        ...


class LaneCopies(Protocol):
    """Copies out of lanes and into them. All bytes are uint8 [bytes]."""

    def save(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
    ) -> Arrival:
        """Copy the rows at places `runs`, as LaneCache.row_blocks has them, and all recurrent
        state, where regions are given for them. The lane may change afterwards, as far as `use`
        and `rewrite` are told.
        """
        ...

    def restore(
        self,
        lane: int,
        pairs: Iterable[Pair],
        memory: object,
        after: Sequence[Arrival],
    ) -> None:
        """Copy pairs of bytes of the lane and of host memory, which `memory` keeps alive, once the
        saves `after` have arrived. The iterable may be run through in another thread, later.
        """
        ...

    def use(self, lanes: Sequence[int]) -> None:
        """What is queued from here on may read and write these lanes."""
        ...

    def rewrite(self, lane: int) -> None:
        """The lane's recurrent state is about to be forgotten: its next tokens begin at 0."""
        ...

    def settled(self, lane: int) -> bool:
        """Whether the last restore of the lane has arrived."""
        ...

    def settle(self, lane: int) -> None:
        """Wait for the last restore of the lane."""
        ...

    def close(self) -> None:
        """Wait for everything. May be called twice."""
        ...


class _Arrived:
    """Copies that were made at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """They are there."""


class DirectCopies:
    """Copies by the CPU, made when they are asked for; other threads run meanwhile."""

    def __init__(self, cache: LaneCache) -> None:
        self._cache = cache

    def save(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
    ) -> Arrival:
        """See LaneCopies."""
        if row_region is not None:
            sources, begins = zip(*self._cache.row_blocks(lane, runs), strict=True)
            fill(row_region, [*begins], [source.numpy() for source in sources])
        if state_region is not None:
            sources = [source.numpy() for source in self._cache.state_bytes(lane).values()]
            ends = [*itertools.accumulate(source.nbytes for source in sources)]
            fill(state_region, [0, *ends[:-1]], sources)
        return _Arrived()

    def restore(
        self,
        lane: int,
        pairs: Iterable[Pair],
        memory: object,
        after: Sequence[Arrival],
    ) -> None:
        """See LaneCopies."""
        for target, source in pairs:  # twice as fast as torch copies bytes
            fill(target.numpy(), [0], [source.numpy()])

    def use(self, lanes: Sequence[int]) -> None:
        """Nothing is under way."""

    def rewrite(self, lane: int) -> None:
        """Nothing is under way."""

    def settled(self, lane: int) -> bool:
        """See LaneCopies."""
        return True

    def settle(self, lane: int) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""
