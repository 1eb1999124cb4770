"""The draft's side of a node: the features of its tokens, between the ring and host memory.

Owns no features: a node's are with MemoryNodes, a lane's in the ring. Knows no tree and no target.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from luceasync.dflash.feature_node import Features, decode, encode
from luceasync.dflash.features import FeatureRing
from luceasync.errors import SnapshotMismatch
from luceasync.hoststore.copy_stream import copy_beside
from luceasync.hoststore.memory import HostMemory

log = logging.getLogger(__name__)


class Restored(Protocol):
    """Who speculates from restored features; luceasync.dflash.decode.Speculator is one."""

    def restored(self, lane: int, begin: int, features: Tensor | None) -> None: ...


class DraftFeatures:
    """See luceasync.keeping.memory_nodes.Features."""

    def __init__(self, ring: FeatureRing, speculator: Restored, memory: HostMemory) -> None:
        self._ring = ring
        self._speculator = speculator
        self._memory = memory

    @property
    def num_tokens(self) -> int:
        return self._ring.capacity_tokens

    def num_bytes(self, num_tokens: int) -> int:
        row_bytes = self._ring.spec.width * self._ring.store.element_size()
        return min(num_tokens, self._ring.capacity_tokens) * row_bytes

    @torch.inference_mode()
    def rows_of(self, lane: int, begin: int, end: int) -> dict[str, Tensor]:
        """What the ring still holds of the span, in nodes' memory. Raises MemoryError."""
        held = self._ring.held(lane, begin, end)
        if not held:
            return {}
        rows = self._ring.rows(lane, held.start, held.stop)
        source = rows.reshape(-1).view(torch.uint8)
        host = torch.frombuffer(self._memory.allocate(source.numel()), dtype=torch.uint8)
        copy_beside([(host, source)])
        self._ring.platform.synchronize()
        return encode(self._ring.spec, Features(held.start, host.view(rows.dtype).view(rows.shape)))

    def take_up(
        self,
        lane: int,
        spans: Sequence[tuple[int, int, Mapping[str, Tensor]]],
        num_tokens: int,
    ) -> None:
        """From the last span back, until one has none, or enough are there."""
        parts: list[Tensor] = []
        first = num_tokens
        for begin, end, tensors in reversed(spans):
            found = self._decoded(tensors, begin, end)
            if found is None or found.begin >= first:  # of a part that is not taken up
                break
            parts.append(found.rows[: first - found.begin])
            first = min(first, found.begin)
            if found.begin > begin or num_tokens - first >= self._ring.capacity_tokens:
                break
        rows = torch.cat(parts[::-1]) if parts else None
        self._speculator.restored(lane, first, rows)

    def _decoded(self, tensors: Mapping[str, Tensor], begin: int, end: int) -> Features | None:
        try:
            return decode(self._ring.spec, tensors, begin=begin, end=end)
        except SnapshotMismatch as error:
            log.debug("features are left unused: %s", error)
            return None
