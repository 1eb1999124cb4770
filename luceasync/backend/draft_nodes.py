"""Rows of features that belong to nodes: in memory that was lent, or in this process's own.

A node is known by its place: where it begins in what was lent, or a number. Knows no lane.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from luceasync.hoststore.memory import HostMemory
from luceasync.ipc.memory import SealedMemory
from luceasync.pipeline.crossing import views
from luceasync.pipeline.sizes import Spec


class RowMemory(Protocol):
    """Where they lie. `spec`: shape and dtype of all rows that are meant."""

    def make(self, place: int, spec: Spec) -> Tensor:
        """Rows of any content, for a new node. Raises MemoryError, and ValueError for a place that
        is none.
        """
        ...

    def rows(self, place: int, begin: int, spec: Spec) -> Tensor:
        """Rows of a node from its row `begin` on. Raises ValueError for those that it has not."""
        ...


class LentRows:
    """In memory that others map too, who say where."""

    def __init__(self, memory: SealedMemory, row_bytes: int) -> None:
        self._memory = memory
        self._row_bytes = row_bytes

    def make(self, place: int, spec: Spec) -> Tensor:
        return self.rows(place, 0, spec)

    def rows(self, place: int, begin: int, spec: Spec) -> Tensor:
        (num_rows, _), _ = spec
        first = place + begin * self._row_bytes
        end = first + num_rows * self._row_bytes
        if end > self._memory.num_bytes:
            raise ValueError(f"rows until byte {end} of a memory of {self._memory.num_bytes}")
        return views(self._memory.view[first:end], [spec])[0]


class OwnRows:
    """In memory of this process."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._nodes: dict[int, Tensor] = {}

    def make(self, place: int, spec: Spec) -> Tensor:
        shape, dtype = spec
        num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        made = torch.frombuffer(self._memory.allocate(num_bytes), dtype=dtype).view(shape)
        self._nodes[place] = made
        return made

    def rows(self, place: int, begin: int, spec: Spec) -> Tensor:
        (num_rows, _), _ = spec
        if place not in self._nodes:
            raise ValueError(f"node {place} is asked for, and is not here")
        whole = self._nodes[place]
        if begin + num_rows > len(whole):
            raise ValueError(f"rows until {begin + num_rows} of a node that has {len(whole)}")
        return whole[begin : begin + num_rows]

    def forget(self, place: int) -> None:
        """Let a node go, if it is here."""
        self._nodes.pop(place, None)
