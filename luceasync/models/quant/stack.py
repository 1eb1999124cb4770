"""Reading quantised matrices from a file to their device, row slice by row slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.models.encodings import Select, Shape, WeightPlacement
from luceasync.models.quant.layout import QuantLayout
from luceasync.models.quant.packed import Packed, empty
from luceasync.models.weights import EmbeddingTable, Weight


class StoredQuantised(Protocol):
    """A quantised tensor as a format has read it."""

    @property
    def label(self) -> str:
        """Its file and its name there, for errors."""
        ...

    def packed(self, select: Select) -> Iterator[Packed]:
        """The rows that `select` picks, slice by slice."""
        ...


class QuantStack:
    """The Stack of quantised rows."""

    def __init__(self, layout: QuantLayout, shape: Shape, place: WeightPlacement) -> None:
        self._place = place
        self._rows = empty(layout, shape[0], shape[1], place.device)

    def fill(self, begin: int, stored: StoredQuantised, select: Select) -> int:
        """Fill rows from `begin` on. Raises ModelError for a scale that is not finite."""
        num_bytes = 0
        for part in stored.packed(select):
            _check_scales(part, stored.label)
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


def _check_scales(packed: Packed, label: str) -> None:
    if packed.layout.scale == "e8m0":
        is_fine = bool((packed.scales != 255).all())
    else:
        found = (packed.scales, packed.minimums, packed.small_scales)
        is_fine = all(_is_finite(tensor, packed.layout) for tensor in found if tensor is not None)
    if not is_fine:
        raise ModelError(f"{label} has a scale that is not finite")


def _is_finite(tensor: Tensor, layout: QuantLayout) -> bool:
    if not tensor.dtype.is_floating_point:
        return True
    return bool(torch.isfinite(tensor.float()).all())


def with_smaller_supergroups(packed: Packed, layout: QuantLayout) -> Packed:
    """The same numbers in `layout`, whose super-groups divide the former ones."""
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
