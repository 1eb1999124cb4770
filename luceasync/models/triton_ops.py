"""The operations of models.ops on GPUs: fused Triton kernels, and the library's products for many
rows. Chooses the kernel by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import gemv as decode_rows
from luceasync.kernels import positions as position_kernels
from luceasync.kernels import rows as row_kernels
from luceasync.kernels import small_gemm
from luceasync.models import triton_experts
from luceasync.models.ops import ExpertGroup, RoutedExperts, TorchTable
from luceasync.models.quant.gpu import TiledQuantStack, TiledQuantSwiGLU, TiledQuantWeight
from luceasync.models.quant.packed import Packed
from luceasync.models.quant.tiles import can_tile, tile
from luceasync.models.quant.torch_weight import TorchQuantWeight
from luceasync.models.trees import Trees
from luceasync.models.weights import (
    Choice,
    EmbeddingTable,
    ExpertWeights,
    InputNorm,
    Router,
    Routing,
    StackedWeight,
    SwiGLU,
    Weight,
)

DECODE_ROWS = 8  # up to this many rows, the decode kernels are the fastest in any pass
SLICE_NUMBERS = (
    1 << 23
)  # numbers of a quantised matrix that are float32 at once; fits into the workspace
SWIGLU_ROWS = 32  # up to this many rows, small_gemm beats the library with two weights at once

T = TypeVar("T")


class TritonOps:
    """Ops of GPUs. All can be captured as CUDA graphs.

    In decode, with one row for each entry, a row's bits do not depend on the other rows, up to
    MAX_ROWS of them.
    """

    def pack(self, rows: Tensor) -> Weight:
        return TritonTable(rows)

    def table(self, rows: Tensor) -> EmbeddingTable:
        return TritonTable(rows)

    def quantised(self, packed: Packed, dtype: torch.dtype) -> EmbeddingTable:
        # Kernels multiply codes in bfloat16, whose results would differ from float32.
        if dtype != torch.bfloat16 or not can_tile(packed.layout, *packed.shape):
            return TorchQuantWeight(packed, dtype, slice_numbers=SLICE_NUMBERS)
        num_bytes = packed.num_bytes
        return TiledQuantWeight(tile(packed), num_bytes, dtype)

    def stacked(self, segments: Sequence[Weight]) -> Weight:
        tiled = [segment for segment in segments if isinstance(segment, TiledQuantWeight)]
        return TiledQuantStack(tiled) if len(tiled) == len(segments) else StackedWeight(segments)

    def gated(self, gate_up: Weight, down: Weight) -> SwiGLU:
        if isinstance(gate_up, TiledQuantWeight) and isinstance(down, TiledQuantWeight):
            return TiledQuantSwiGLU(gate_up, down)
        return SwiGLU(gate_up, down)

    def follow(self, weight: Weight, norm: InputNorm) -> None:
        if isinstance(weight, TiledQuantWeight):
            weight.precede(norm)

    def float_matrix(self, rows: Tensor) -> Weight:
        return TritonTable(rows)

    def experts(self, rows: Tensor, num_experts: int, num_parts: int) -> ExpertWeights:
        return triton_experts.PlainExperts(rows, num_experts, num_parts)

    def quantised_experts(
        self, packed: Packed, num_experts: int, num_parts: int, dtype: torch.dtype
    ) -> ExpertWeights:
        return triton_experts.quantised_experts(packed, num_experts, num_parts, dtype)

    def routed(
        self, router: Router, gate_up: ExpertWeights, down: ExpertWeights, shared: SwiGLU | None
    ) -> RoutedExperts:
        return triton_experts.TritonRoutedExperts(self, router, gate_up, down, shared)

    def grouped(self, *experts: ExpertWeights) -> ExpertGroup:
        return ExpertGroup(self, experts)

    def choose(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> Choice:
        return triton_experts.choose(logits, bias, routing)

    def add_weighted(self, results: Tensor, choice: Choice, base: Tensor) -> Tensor:
        return triton_experts.add_weighted(results, choice, base)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return row_kernels.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    def add_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, factor: Tensor | None = None
    ) -> Tensor:
        flat, beside = (each.reshape(-1, each.shape[-1]) for each in (x, residual))
        return row_kernels.rms_norm(flat, weight, eps, beside, factor).view(x.shape)

    def norm_values(
        self, projected: Tensor, begin: int, end: int, head_dim: int, eps: float
    ) -> Tensor:
        flat = projected.reshape(-1, projected.shape[-1])
        found = row_kernels.norm_values(flat, begin, end, head_dim, eps)
        return found.view(*projected.shape[:-1], -1)

    def geglu(self, gate_up: Tensor) -> Tensor:
        flat = gate_up.reshape(-1, gate_up.shape[-1])
        return row_kernels.geglu(flat).view(*gate_up.shape[:-1], -1)

    def row_indices(self, positions: Tensor, lanes: Tensor, absent: Tensor) -> Tensor:
        return position_kernels.row_indices(positions, lanes, absent)

    def trees(self, parents: Tensor, reach: int) -> Trees:
        return Trees(*position_kernels.trees(parents, reach))

    def pick(
        self,
        torch_body: Callable[[], T],
        triton_body: Callable[[], T],
        compiled_body: Callable[[], T],
    ) -> T:
        return triton_body()


class TritonTable(TorchTable):
    """A plain matrix, multiplied by the fastest kernel for the number of rows."""

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        flat, fused = x.reshape(-1, x.shape[-1]), _fused(x, small_gemm.MAX_ROWS)
        out = fused.linear(flat, self.rows) if fused else F.linear(flat, self.rows)
        return out.view(*x.shape[:-1], -1)

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        flat, flat_residual = x.reshape(-1, x.shape[-1]), residual.view(-1, residual.shape[-1])
        if fused := _fused(x, small_gemm.MAX_ROWS):
            added: Tensor = fused.linear(flat, self.rows, flat_residual)
            return added.view_as(residual)
        flat_residual.addmm_(flat, self.rows.t())  # in place, which saves a copy
        return residual

    def swiglu(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        flat = x.reshape(-1, x.shape[-1])
        if fused := _fused(x, SWIGLU_ROWS):
            out: Tensor = fused.swiglu(flat, self.rows)
        else:
            out = row_kernels.swiglu(F.linear(flat, self.rows))
        return out.view(*x.shape[:-1], -1)


def _fused(x: Tensor, max_rows: int) -> ModuleType | None:
    """The kernels for `x`, [..., rows, dim]; None if the library is faster, which is so from
    `max_rows` on. Measured on an H200 with bfloat16 weights."""
    num_rows = x.numel() // x.shape[-1]
    if num_rows <= DECODE_ROWS or (num_rows <= decode_rows.MAX_ROWS and x.shape[-2] == 1):
        return decode_rows
    return small_gemm if num_rows <= max_rows and x.element_size() == 2 else None
