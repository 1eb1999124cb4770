"""Bytes between a lane and host memory: what is asked of any device, and the CPU's body.

Knows no node: it is told which bytes go where. Engine thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from luceasync.cyext.flatten import fill
from luceasync.hoststore.copy_stream import Before, Pair
from luceasync.hoststore.tickets import Arrived, Ticket
from luceasync.kv.cache import LaneCache


class Arrival(Ticket, Before, Protocol):
    """A ticket of a save, which a device's later copies can be put behind."""


class LaneCopies(Protocol):
    """Copies out of lanes and into them. All bytes are uint8 [bytes]."""

    def take_out(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
    ) -> Arrival:
        """Copy the rows at places `runs`, as LaneCache.row_blocks has them, and all recurrent
        state, `end` among the lanes' ends, where regions are given for them. The lane may change
        afterwards, as far as `use` and `rewrite` are told.
        """
        ...

    def put_in(
        self,
        lane: int,
        pairs: Iterable[Pair],
        memory: object,
        after: Sequence[Arrival],
    ) -> Ticket:
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

    def close(self) -> None:
        """Wait for everything. May be called twice."""
        ...


class _Saved(Arrived):
    """Of a save by the CPU."""

    def precede(self, stream: torch.cuda.Stream) -> None:
        """It is over."""


class DirectCopies:
    """Copies by the CPU, made when they are asked for; other threads run meanwhile."""

    def __init__(self, cache: LaneCache) -> None:
        self._cache = cache

    def take_out(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
    ) -> Arrival:
        """See LaneCopies."""
        if row_region is not None:
            sources, begins = zip(*self._cache.row_blocks(lane, runs), strict=True)
            fill(row_region, [*begins], [source.numpy() for source in sources])
        if state_region is not None:
            states = [source.numpy() for source in self._cache.state_bytes(end).values()]
            ends = [*itertools.accumulate(state.nbytes for state in states)]
            fill(state_region, [0, *ends[:-1]], states)
        return _Saved()

    def put_in(
        self,
        lane: int,
        pairs: Iterable[Pair],
        memory: object,
        after: Sequence[Arrival],
    ) -> Ticket:
        """See LaneCopies."""
        for target, source in pairs:  # twice as fast as torch copies bytes
            fill(target.numpy(), [0], [source.numpy()])
        return Arrived()

    def use(self, lanes: Sequence[int]) -> None:
        """Nothing is under way."""

    def rewrite(self, lane: int) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""
