"""Where rows of a lane's tokens lie in host memory, and where they belong in the lane.

Plain data: whoever copies is given it. Knows no node's name and no stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from luceasync.hoststore.copy_stream import Before, Pair
from luceasync.hoststore.tickets import Ticket
from luceasync.kv.cache import Shape, TensorKey, total_bytes


class Arrival(Ticket, Before, Protocol):
    """A ticket of a save, which a device's later copies can be put behind."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows of a lane's tokens `[begin, end)` in host memory: rows `[first, first + end - begin)` of
    each of `tensors` [rows of the node, ...], contiguous. `arrival`: of the save that still writes
    them; None: they are there. The object keeps the memory alive: keep it until a copy is over.
    """

    begin: int
    end: int
    first: int
    tensors: Mapping[TensorKey, Tensor]
    arrival: Arrival | None

    @property
    def num_rows(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class PageRows:
    """Rows `host` (all of its tokens) belong at places `[place, place + len)` of the lane."""

    host: HostRows
    place: int


def pairs_of(lane_bytes: Mapping[TensorKey, Tensor], rows: Sequence[PageRows]) -> Iterator[Pair]:
    """The bytes of a lane, of which `lane_bytes` has those of each tensor, and of host memory that
    belong together, tensor by tensor.
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
    """A region that holds tensors of `shapes`, one after the other, as host rows: run i of a lane's
    places belongs at row `at[i]` and those that follow.
    """
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
