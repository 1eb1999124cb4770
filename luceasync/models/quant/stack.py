"""Reading quantised matrices from a file to their device, row slice by row slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from luceasync.models.encodings import Select, Shape, WeightPlacement, is_finite
from luceasync.models.quant.layout import QuantLayout
from luceasync.models.quant.packed import Packed, empty
from luceasync.models.weights import EmbeddingTable, ExpertWeights, Weight


class StoredQuantised(Protocol):
    """A quantised tensor as a format has read it."""

    @property
    def label(self) -> str:
        """Its file and its name there, for errors."""
        ...

    def packed(self, select: Select, place: WeightPlacement) -> Iterator[Packed]:
        """The rows that `select` picks on the place's device, piece by piece; each is valid until
        the next one is requested. Raises ModelError."""
        ...


class QuantStack:
    """The Stack of quantised rows."""

    def __init__(self, layout: QuantLayout, shape: Shape, place: WeightPlacement) -> None:
        self._place = place
        self._rows = empty(layout, shape[0], shape[1], place.device)
        for tensor in self._rows.tensors.values():
            place.transfer.prepare(tensor)

    def fill(self, begin: int, stored: StoredQuantised, select: Select) -> int:
        """Fill rows from `begin` on. A scale that is not finite becomes a finding."""
        num_bytes, fault = 0, f"{stored.label} has a scale that is not finite"
        for part in stored.packed(select, self._place):
            for scales in _checked(part):
                self._place.findings.expect(scales, fault)
            end = begin + part.shape[0]
            room = self._rows.rows(begin, end).tensors
            for name, tensor in part.tensors.items():
                room[name].copy_(tensor)
            begin, num_bytes = end, num_bytes + part.num_bytes
        return num_bytes

    def weight(self) -> Weight:
        return self._place.ops.quantised(self._rows, self._place.dtype)

    def table(self) -> EmbeddingTable:
        return self._place.ops.quantised(self._rows, self._place.dtype)

    def experts(self, num_experts: int, num_parts: int) -> ExpertWeights:
        ops, dtype = self._place.ops, self._place.dtype
        return ops.quantised_experts(self._rows, num_experts, num_parts, dtype)


def _checked(packed: Packed) -> list[Tensor]:
    """Whether each kind of scale is finite: bool [], on their device."""
    if packed.layout.scale == "e8m0":
        return [(packed.scales != 255).all()]
    found = (packed.scales, packed.minimums, packed.small_scales)
    return [
        is_finite(tensor.float())
        for tensor in found
        if tensor is not None and tensor.dtype.is_floating_point
    ]


def with_smaller_supergroups(packed: Packed, layout: QuantLayout) -> Packed:
    """The same numbers in `layout`, whose super-groups are parts of the former ones."""
    before, after = packed.layout.supergroup, layout.supergroup
    if before == after or before is None or after is None:
        return packed
    changed = packed.tensors
    num_supergroups = -(-packed.shape[1] // after)
    for name in ("scales", "minimums"):
        if name in changed:
            repeated = changed[name].repeat_interleave(before // after, 1)
            changed[name] = repeated[:, :num_supergroups]
    return Packed(layout, **changed)


def with_columns_moved(packed: Packed, shape: tuple[int, int, int]) -> Packed:
    """View the columns as `shape` and swap its first two axes. The last axis is whole groups,
    super-groups and blocks of codes.
    """

    def moved(tensor: Tensor) -> Tensor:
        first, second, _ = shape
        by_head: Tensor = tensor.unflatten(-1, (first, second, -1))
        return by_head.transpose(-3, -2).flatten(-3)

    return Packed(packed.layout, **{name: moved(t) for name, t in packed.tensors.items()})
