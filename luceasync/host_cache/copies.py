"""Copies of bytes between lanes and host memory: the protocol for any device, and the
implementation for CPUs.

Does not know nodes: the caller says which bytes go where. Engine thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from luceasync.cyext.flatten import fill
from luceasync.host_cache.copy_stream import DoneTicket, Pair, StreamDependency, Ticket
from luceasync.kv.cache import LaneCache, Shape, TensorKey, total_bytes


class SaveTicket(Ticket, StreamDependency, Protocol):
    """The ticket of a save; later copies of a device can be ordered after it."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows of a lane's tokens `[begin, end)` in host memory: rows `[first, first + end - begin)` of
    each of `tensors` [rows of the node, ...], contiguous. `arrival`: the ticket of the save that
    still writes them, None if it is over. The object keeps the memory alive: hold it until a copy
    is over."""

    begin: int
    end: int
    first: int
    tensors: Mapping[TensorKey, Tensor]
    arrival: SaveTicket | None

    @property
    def num_rows(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class PageRows:
    """The rows of `host` belong at places `[place, place + num_rows)` of the lane."""

    host: HostRows
    place: int


def pairs_of(lane_bytes: Mapping[TensorKey, Tensor], rows: Sequence[PageRows]) -> Iterator[Pair]:
    """The corresponding bytes of a lane and of host memory, tensor by tensor; `lane_bytes`: the
    lane's bytes of each tensor.
    """
    for key, of_lane in lane_bytes.items():
        for each in rows:
            source = each.host.tensors[key]
            row_bytes = source[:1].nbytes
            begin, size = each.host.first * row_bytes, each.host.num_rows * row_bytes
            here = of_lane[each.place * row_bytes : each.place * row_bytes + size]
            yield here, source.view(-1).view(torch.uint8)[begin : begin + size]


def rows_in(
    region: memoryview, shapes: Mapping[TensorKey, Shape], runs: Sequence[range], at: Sequence[int]
) -> list[PageRows]:
    """Host rows in a region that holds tensors of `shapes`, one after the other: run i of a lane's
    places belongs to the rows from `at[i]` on."""
    sizes = [total_bytes([shape]) for shape in shapes.values()]
    parts = torch.frombuffer(region, dtype=torch.uint8).split(sizes)
    tensors = {
        key: part.view(dtype).view(shape)
        for (key, (shape, dtype)), part in zip(shapes.items(), parts, strict=True)
    }
    return [
        PageRows(HostRows(first, first + len(run), first, tensors, None), run.start)
        for run, first in zip(runs, at, strict=True)
    ]


class LaneCopies(Protocol):
    """Copies out of lanes and into them. All bytes are uint8 [bytes]."""

    def save(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
        rows_at: Sequence[int] | None = None,
    ) -> SaveTicket:
        """Copy the rows at places `runs`, as LaneCache.row_blocks has them, and all recurrent
        state, `end` among the lanes' ends, into the given regions. `rows_at`: the row of the region
        at which each run begins, if the runs leave rows out. The lane may change afterwards, but
        only after a call of `use`, `rewrite` or `freed`."""
        ...

    def restore(
        self,
        lane: int,
        pairs: Iterable[Pair],
        memory: object,
        after: Sequence[SaveTicket],
    ) -> Ticket:
        """Copy pairs of bytes of the lane and of host memory, which `memory` keeps alive, once the
        saves `after` have arrived. The iterable may be consumed later, in another thread.
        """
        ...

    def page_in(self, lane: int, rows: Sequence[PageRows]) -> Ticket:
        """Copy rows of host memory to places of the lane that no work queued from here on reads or
        writes before `listed`. The copies start once the rows have arrived, and once the work
        queued so far and saves of the lane have read these places."""
        ...

    def listed(self, lane: int) -> None:
        """Work queued from here on may read everything that was paged in."""
        ...

    def freed(self, lane: int) -> None:
        """Work queued from here on may write places of the lane that a save still reads."""
        ...

    def use(self, lanes: Sequence[int]) -> None:
        """Work queued from here on may read and write these lanes."""
        ...

    def rewrite(self, lane: int) -> None:
        """The lane's recurrent state will be overwritten: its next tokens begin at 0."""
        ...

    def rehearse(self) -> None:
        """Compile the kernels that move pages, if any."""
        ...

    def close(self) -> None:
        """Wait for all copies. Idempotent."""
        ...


class _SavedTicket(DoneTicket):
    """The ticket of a save by the CPU."""

    def precede(self, stream: torch.cuda.Stream) -> None:
        """No-op: it has arrived already."""


class DirectCopies:
    """Copies by the CPU, made at once; other threads can run meanwhile."""

    def __init__(self, cache: LaneCache) -> None:
        self._cache = cache

    def save(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
        rows_at: Sequence[int] | None = None,
    ) -> SaveTicket:
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
        return _SavedTicket()

    def restore(
        self,
        lane: int,
        pairs: Iterable[Pair],
        memory: object,
        after: Sequence[SaveTicket],
    ) -> Ticket:
        for target, source in pairs:  # twice as fast as torch copies bytes
            fill(target.numpy(), [0], [source.numpy()])
        return DoneTicket()

    def page_in(self, lane: int, rows: Sequence[PageRows]) -> Ticket:
        for each in rows:
            if each.host.arrival is not None:
                each.host.arrival.wait()
        for target, source in pairs_of(self._cache.row_bytes(lane), rows):
            fill(target.numpy(), [0], [source.numpy()])
        return DoneTicket()

    def listed(self, lane: int) -> None:
        """No-op: nothing is in progress."""

    def freed(self, lane: int) -> None:
        """No-op: nothing is in progress."""

    def use(self, lanes: Sequence[int]) -> None:
        """No-op: nothing is in progress."""

    def rewrite(self, lane: int) -> None:
        """No-op: nothing is in progress."""

    def rehearse(self) -> None:
        """No-op: there is nothing to compile."""

    def close(self) -> None:
        """No-op: nothing is held."""


def shapes_in(cache: LaneCache, region: memoryview) -> dict[TensorKey, Shape]:
    """The shapes of the tensors that fill a region of rows."""
    return cache.row_shapes(region.nbytes // total_bytes(cache.row_shapes(1).values()))
