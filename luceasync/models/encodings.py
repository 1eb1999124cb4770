"""How a file stores the numbers of a tensor, and how they become a weight where they run.

Owns the protocols that formats and devices meet in, and plain numbers. Pure at its top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from luceasync.models.precision import Precision
from luceasync.models.weights import EmbeddingTable, Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from luceasync.models.ops import Ops

Shape = tuple[int, ...]
Select = Callable[["Tensor"], "Tensor"]  # takes rows of a stored matrix, or of what belongs to them


class Stack(Protocol):
    """A matrix that is being read, part by part, to its final place."""

    def fill(self, begin: int, stored: Any, select: Select) -> int:
        """Put the rows that `select` takes of `stored`, which a format has read, at row `begin`.
        Returns the bytes that were read for them.
        """
        ...

    def weight(self) -> Weight:
        """The whole of it, packed; nothing is filled afterwards."""
        ...

    def table(self) -> EmbeddingTable:
        """The whole of it, rows as they are."""
        ...


class Encoding(Protocol):
    """How a file stores the numbers of one tensor. Equal forms may share a Stack."""

    def num_bytes(self, shape: Shape, precision: Precision) -> int:
        """What a tensor of that shape takes on a device."""
        ...

    def words(self, shape: Shape, precision: Precision) -> str:
        """What the type of its numbers is called, there."""
        ...

    def stack(self, shape: Shape, place: WeightPlacement) -> Stack:
        """Room for a matrix of that shape."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """Where weights are to be, in which dtype plain ones, and the operations that use them."""

    ops: Ops
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DenseEncoding:
    """Plain numbers. Matrices take the model's dtype; other tensors are float32 where they run."""

    def num_bytes(self, shape: Shape, precision: Precision) -> int:
        return prod(shape) * (precision.weight_bytes if len(shape) == 2 else 4)

    def words(self, shape: Shape, precision: Precision) -> str:
        return precision.weights if len(shape) == 2 else "fp32"

    def stack(self, shape: Shape, place: WeightPlacement) -> Stack:
        return _DenseStack(shape, place)


class _DenseStack:
    """Filled part by part, so that beside it no more than one stored tensor is ever held."""

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
