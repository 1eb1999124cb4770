"""Rows of features that lanes have left behind: what nodes hold of them, without their names.

Owns where they lie. Knows no tree, and not which of them a prefix needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from luceasync.dflash.feature_spec import FeatureSpec
from luceasync.dflash.features import FeatureRing
from luceasync.hoststore.copy_stream import copy_beside
from luceasync.hoststore.memory import HostMemory

C = TypeVar("C")


class Part(NamedTuple, Generic[C]):
    """Rows `[begin, end)` of a content."""

    content: C
    begin: int
    end: int


class FeatureContents(Protocol[C]):
    """Rows outside of lanes, wherever drafter and memory are. Engine thread only."""

    spec: FeatureSpec
    capacity_tokens: int  # of a lane
    row_bytes: int

    def held(self, lane: int, begin: int, end: int) -> range:
        """See LaneSpans."""
        ...

    def take_out(self, lane: int, begin: int, end: int) -> C:
        """Copy the lane's rows of positions `[begin, end)`, which it holds. Raises MemoryError."""
        ...

    def put_in(self, lane: int, begin: int, parts: Sequence[Part[C]]) -> None:
        """The lane has these rows, one part after the other, of positions from `begin` on, and no
        others.
        """
        ...

    def is_there(self, content: C) -> bool:
        """Whether it can still be had: a process that has ended may have taken it along."""
        ...

    def rows(self, content: C) -> Tensor | None:
        """The rows, [tokens, taps * hidden] on the host, not to be changed; None: they are gone."""
        ...

    def given(self, rows: Tensor) -> C:
        """A content of rows on the host, [tokens, taps * hidden] of a dtype of FLOATS. Raises
        MemoryError where they are copied.
        """
        ...

    def let_go(self, content: C) -> None:
        """Forget it."""
        ...


class Lanes(Protocol):
    """Whose rows they are; luceasync.dflash.passes.LocalDraft is one."""

    @property
    def ring(self) -> FeatureRing: ...

    def restore(self, lane: int, begin: int, rows: Tensor) -> None: ...


class LocalFeatures:
    """See FeatureContents: of a drafter in this process, in memory for nodes."""

    def __init__(self, lanes: Lanes, memory: HostMemory) -> None:
        ring = lanes.ring
        self.spec, self.capacity_tokens = ring.spec, ring.capacity_tokens
        self.row_bytes = ring.spec.width * ring.store.element_size()
        self._lanes = lanes
        self._ring = ring
        self._memory = memory

    def held(self, lane: int, begin: int, end: int) -> range:
        return self._ring.held(lane, begin, end)

    @torch.inference_mode()
    def take_out(self, lane: int, begin: int, end: int) -> Tensor:
        rows = self._ring.rows(lane, begin, end)
        source = rows.reshape(-1).view(torch.uint8)
        host = torch.frombuffer(self._memory.allocate(source.numel()), dtype=torch.uint8)
        copy_beside([(host, source)])
        self._ring.platform.synchronize()
        return host.view(rows.dtype).view(rows.shape)

    @torch.inference_mode()
    def put_in(self, lane: int, begin: int, parts: Sequence[Part[Tensor]]) -> None:
        rows = [part.content[part.begin : part.end] for part in parts]
        self._lanes.restore(lane, begin, torch.cat(rows))

    def is_there(self, content: Tensor) -> bool:
        return True

    def rows(self, content: Tensor) -> Tensor:
        return content

    def given(self, rows: Tensor) -> Tensor:
        return rows

    def let_go(self, content: Tensor) -> None:
        """Its memory goes back when the last view of it is gone."""
