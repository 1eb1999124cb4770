"""Bytes between a lane and host memory: what is asked of any device, and the CPU's body.

Knows no node: it is told which bytes go where. Engine thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from luceasync.cyext.flatten import fill
from luceasync.hoststore.copy_stream import Pair
from luceasync.hoststore.host_rows import Arrival, PageRows, pairs_of, rows_in
from luceasync.hoststore.tickets import Arrived, Ticket
from luceasync.kv.cache import LaneCache, Shape, TensorKey, total_bytes


class LaneCopies(Protocol):
    """Copies out of lanes and into them. All bytes are uint8 [bytes]."""

    def take_out(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
        rows_at: Sequence[int] | None = None,
    ) -> Arrival:
        """Copy the rows at places `runs`, as LaneCache.row_blocks has them, and all recurrent
        state, `end` among the lanes' ends, where regions are given for them. `rows_at`: the row of
        the region at which each run begins, where they leave some out. The lane may change
        afterwards, as far as `use`, `rewrite` and `freed` are told.
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

    def page_in(self, lane: int, rows: Sequence[PageRows]) -> Ticket:
        """Copy rows of host memory to places of the lane that nothing which is queued from here on
        reads or writes, until `listed`. They are copied once they have arrived, and once what has
        been queued so far, and saves of the lane, have read what is there.
        """
        ...

    def listed(self, lane: int) -> None:
        """What is queued from here on may read all that was paged in."""
        ...

    def freed(self, lane: int) -> None:
        """What is queued from here on may write places of the lane that a save still reads."""
        ...

    def use(self, lanes: Sequence[int]) -> None:
        """What is queued from here on may read and write these lanes."""
        ...

    def rewrite(self, lane: int) -> None:
        """The lane's recurrent state is about to be forgotten: its next tokens begin at 0."""
        ...

    def rehearse(self) -> None:
        """Compile what moves pages, where it is compiled."""
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
        rows_at: Sequence[int] | None = None,
    ) -> Arrival:
        """See LaneCopies."""
        if row_region is not None and rows_at is not None:
            shapes = shapes_in(self._cache, row_region)
            pages = rows_in(row_region, shapes, runs, rows_at)
            for source, target in pairs_of(self._cache.row_bytes(lane), pages):
                fill(target.numpy(), [0], [source.numpy()])
        elif row_region is not None:
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

    def page_in(self, lane: int, rows: Sequence[PageRows]) -> Ticket:
        """See LaneCopies."""
        for each in rows:
            if each.host.arrival is not None:
                each.host.arrival.wait()
        for target, source in pairs_of(self._cache.row_bytes(lane), rows):
            fill(target.numpy(), [0], [source.numpy()])
        return Arrived()

    def listed(self, lane: int) -> None:
        """Nothing is under way."""

    def freed(self, lane: int) -> None:
        """Nothing is under way."""

    def use(self, lanes: Sequence[int]) -> None:
        """Nothing is under way."""

    def rewrite(self, lane: int) -> None:
        """Nothing is under way."""

    def rehearse(self) -> None:
        """Nothing is compiled."""

    def close(self) -> None:
        """Nothing is held."""


def shapes_in(cache: LaneCache, region: memoryview) -> dict[TensorKey, Shape]:
    """Of the tensors that fill a region of rows."""
    return cache.row_shapes(region.nbytes // total_bytes(cache.row_shapes(1).values()))
