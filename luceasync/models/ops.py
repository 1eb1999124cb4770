"""The operations that every kind of layer is made of, in torch, for any device.

The cuts are where a fused kernel pays: models.triton_ops has the same operations for GPUs, and
these are their slow truth. Knows weights as tensors, no state and no kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.quant.packed import Packed
from luceasync.models.quant.torch_weight import TorchQuantWeight
from luceasync.models.trees import Trees, torch_trees
from luceasync.models.weights import (
    EmbeddingTable,
    InputNorm,
    StackedWeight,
    SwiGLU,
    Weight,
    as_float,
)

T = TypeVar("T")


class Ops(Protocol):
    """What a device computes with."""

    def pack(self, rows: Tensor) -> Weight:
        """A matrix [out, dim], whose memory is given away, as the operations here want it."""
        ...

    def table(self, rows: Tensor) -> EmbeddingTable:
        """A matrix [out, dim], whose memory is given away and whose rows are looked up too."""
        ...

    def quantised(self, packed: Packed, dtype: torch.dtype) -> EmbeddingTable:
        """A quantised matrix, whose memory is given away; `dtype`: of looked up rows."""
        ...

    def stacked(self, segments: Sequence[Weight]) -> Weight:
        """Weights that are stored unlike, one below the other."""
        ...

    def gated(self, gate_up: Weight, down: Weight) -> SwiGLU:
        """A network of two weights of these operations."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, computed in float32, in x's dtype; weight float32."""
        ...

    def row_indices(self, positions: Tensor, lanes: Tensor, absent: Tensor) -> Tensor:
        """How many of their lanes' rows before them are here: `positions` int32 [entries, rows]
        less `absent` int32 [lanes + 1] of `lanes` int32 [entries], where NO_LANE is the last one.
        """
        ...

    def trees(self, parents: Tensor, reach: int) -> Trees:
        """What rows see that form trees; see luceasync.models.trees.torch_trees."""
        ...

    def pick(
        self,
        torch_body: Callable[[], T],
        triton_body: Callable[[], T],
        compiled_body: Callable[[], T],
    ) -> T:
        """Of bodies with one meaning the one for this device."""
        ...


class TorchOps:
    """Ops as plain torch."""

    def pack(self, rows: Tensor) -> Weight:
        return TorchTable(rows)

    def table(self, rows: Tensor) -> EmbeddingTable:
        return TorchTable(rows)

    def quantised(self, packed: Packed, dtype: torch.dtype) -> EmbeddingTable:
        return TorchQuantWeight(packed, dtype)

    def stacked(self, segments: Sequence[Weight]) -> Weight:
        return StackedWeight(segments)

    def gated(self, gate_up: Weight, down: Weight) -> SwiGLU:
        return SwiGLU(gate_up, down)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def row_indices(self, positions: Tensor, lanes: Tensor, absent: Tensor) -> Tensor:
        return positions - absent[lanes.long()][:, None]

    def trees(self, parents: Tensor, reach: int) -> Trees:
        return torch_trees(parents, reach)

    def pick(
        self,
        torch_body: Callable[[], T],
        triton_body: Callable[[], T],
        compiled_body: Callable[[], T],
    ) -> T:
        return torch_body()


class TorchTable:
    """A Table of plain rows; what other bodies share."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows  # [out, dim]

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        return F.linear(x if norm is None else norm(x), self.rows)

    def linear_float(
        self, x: Tensor, norm: InputNorm | None = None, out: Tensor | None = None
    ) -> Tensor:
        return as_float(self.linear(x, norm), out)

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.linear(x)

    def swiglu(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        gate, up = self.linear(x, norm).chunk(2, -1)
        return F.silu(gate) * up

    def lookup(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows)


@dataclass(frozen=True, slots=True)
class Norm:
    """A RowNorm; weight float32 [dim], with the family's offset already added."""

    ops: Ops
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., dim], in its dtype."""
        return self.ops.norm(x, self.weight, self.eps)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32, in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
