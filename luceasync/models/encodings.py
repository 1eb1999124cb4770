"""How a file stores a tensor's numbers, and how they become a weight on a device.

Owns the protocols between formats and devices, and the encoding of plain numbers. Imports no torch
at its top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from luceasync.errors import ModelError
from luceasync.models.precision import Precision
from luceasync.models.weights import EmbeddingTable, Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from luceasync.models.ops import Ops

Shape = tuple[int, ...]
Select = Callable[["Tensor"], "Tensor"]  # selects rows of a stored matrix or of its scales


def check_finite(numbers: Tensor, label: str) -> None:
    """Raise ModelError for a stored tensor with a number that is not finite. `label`: its file and
    name.
    """
    import torch

    least, most = torch.aminmax(numbers)  # NaN if there is one; needs no memory beside the tensor
    if not bool(least.isfinite() & most.isfinite()):
        raise ModelError(f"{label} has a number that is not finite")


class Stack(Protocol):
    """A matrix that is being read part by part to its final place."""

    def fill(self, begin: int, stored: Any, select: Select) -> int:
        """Write the rows that `select` takes of `stored`, which a format has read, from row `begin`
        on. Returns the number of bytes read for them.
        """
        ...

    def weight(self) -> Weight:
        """The whole matrix, packed. Nothing may be filled afterwards."""
        ...

    def table(self) -> EmbeddingTable:
        """The whole matrix with plain rows."""
        ...


class Encoding(Protocol):
    """How a file stores the numbers of one tensor. Tensors of equal encoding may share a Stack."""

    def num_bytes(self, shape: Shape, precision: Precision) -> int:
        """Bytes that a tensor of this shape takes on a device."""
        ...

    def type_name(self, shape: Shape, precision: Precision) -> str:
        """The name of its number type on a device."""
        ...

    def stack(self, shape: Shape, place: WeightPlacement) -> Stack:
        """An empty matrix of this shape."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """The device that weights go to, the dtype of plain ones, and the operations that use them."""

    ops: Ops
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DenseEncoding:
    """Plain numbers. On a device matrices have the model's dtype, other tensors are float32."""

    def num_bytes(self, shape: Shape, precision: Precision) -> int:
        return prod(shape) * (precision.weight_bytes if len(shape) == 2 else 4)

    def type_name(self, shape: Shape, precision: Precision) -> str:
        return precision.weights if len(shape) == 2 else "fp32"

    def stack(self, shape: Shape, place: WeightPlacement) -> Stack:
        return _DenseStack(shape, place)


class _DenseStack:
    """Filled part by part, so that only one stored tensor is held beside it at any time."""

    def __init__(self, shape: Shape, place: WeightPlacement) -> None:
        import torch

        self._ops = place.ops
        self._rows = torch.empty(shape, dtype=place.dtype, device=place.device)

    def fill(self, begin: int, stored: Tensor, select: Select) -> int:
        rows = select(stored)
        self._rows[begin : begin + len(rows)].copy_(rows)
        return rows.nbytes

    def weight(self) -> Weight:
        return self._ops.pack(self._rows)

    def table(self) -> EmbeddingTable:
        return self._ops.table(self._rows)
