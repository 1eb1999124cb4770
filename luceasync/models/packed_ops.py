"""The operations of models.ops on CPUs, with weights in oneDNN's layout.

With plain rows oneDNN loses a quarter of its speed at few rows in bf16, and MKL two thirds in
float32. A row's result does not depend on the rows beside it, from two rows on. oneDNN compiles and
caches a product for each number of rows: numbers are rounded up, and few products are kept.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.cyext.experts import multiply
from luceasync.cyext.rows import MAX_ROW, STEP
from luceasync.cyext.rows import rms_norm as compiled_norm
from luceasync.models import packed_experts, torch_experts
from luceasync.models.ops import TorchOps, TorchTable
from luceasync.models.packed_experts import CompiledExperts, PackedExperts, can_compile
from luceasync.models.pass_rows import round_up_rows
from luceasync.models.quant.cpu import CompiledQuantWeight, best_kernel, can_multiply
from luceasync.models.quant.packed import Packed
from luceasync.models.quant.torch_weight import TorchQuantWeight
from luceasync.models.weights import (
    Choice,
    EmbeddingTable,
    ExpertWeights,
    InputNorm,
    Routing,
    Weight,
)

FEW_ROWS = 64  # of a decode step or a verify pass
MIN_ROWS = 4  # from this many on, a row's float32 bits do not depend on the number of rows
ROWS_HINT = 4  # the layout suits a decode batch; prefill loses nothing by it
# Each takes half a MiB, and under a millisecond to compile again. Enough for all decode steps.
MAX_PRODUCTS = 128
# Numbers of rows in an octave. A padding row costs as much as any row: 0.6 ms in a model whose
# products take 3 ms to compile, and more in larger models.
ROW_COUNTS = 32
# oneDNN caches compiled products, torch their descriptions: 1,000 each by default.
CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

T = TypeVar("T")


class PackedOps(TorchOps):
    """TorchOps with weights in oneDNN's layout. Tables stay plain, so that a tied head gives the
    same bits whether or not the embedding is on its shard.
    """

    def pack(self, rows: Tensor) -> Weight:
        return PackedTable(torch.ops.mkldnn._reorder_linear_weight(rows, ROWS_HINT))

    def table(self, rows: Tensor) -> EmbeddingTable:
        return PackedTable(rows)

    def quantised(self, packed: Packed, dtype: torch.dtype) -> EmbeddingTable:
        kernel = best_kernel()
        if kernel and can_multiply(packed.layout, packed.shape[1]):
            return CompiledQuantWeight(packed, dtype, kernel)
        return TorchQuantWeight(packed, dtype, product)

    def float_matrix(self, rows: Tensor) -> Weight:
        return FloatTable(rows)

    def experts(self, rows: Tensor, num_experts: int, num_parts: int) -> ExpertWeights:
        each = rows.view(num_parts, num_experts, -1, rows.shape[1])
        matrices, room = [], torch.empty_like(each[:, 0]).flatten(0, 1)
        for expert in range(num_experts):
            parts = each[:, expert]
            own = parts[0] if num_parts == 1 else torch.cat(tuple(parts), out=room)
            matrices.append(torch.ops.mkldnn._reorder_linear_weight(own, ROWS_HINT))
        return PackedExperts(matrices, rows.nbytes, product)

    def quantised_experts(
        self, packed: Packed, num_experts: int, num_parts: int, dtype: torch.dtype
    ) -> ExpertWeights:
        kernel, (num_rows, num_columns) = best_kernel(), packed.shape
        is_fine = kernel and can_multiply(packed.layout, num_columns)
        if is_fine and can_compile(num_rows, num_experts, num_parts):
            return CompiledExperts(packed, num_experts, kernel)
        return torch_experts.quantised_experts(packed, num_experts, num_parts, product)

    def choose(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> Choice:
        return packed_experts.choose(logits, bias, routing)

    def add_weighted(self, results: Tensor, choice: Choice, base: Tensor) -> Tensor:
        return packed_experts.add_weighted(results, choice, base)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dim = x.shape[-1]
        if dim % STEP or dim > MAX_ROW or x.dtype not in (torch.float32, torch.bfloat16):
            return super().norm(x, weight, eps)
        rows, out = x.contiguous(), x.new_empty(x.shape)
        places = rows.data_ptr(), weight.data_ptr(), out.data_ptr()
        compiled_norm(*places, x.numel() // dim, dim, eps, x.dtype == torch.bfloat16)
        return out

    def pick(
        self,
        torch_body: Callable[[], T],
        triton_body: Callable[[], T],
        compiled_body: Callable[[], T],
    ) -> T:
        return compiled_body()


class PackedTable(TorchTable):
    """A matrix that oneDNN multiplies. Rows can be looked up only if they are plain."""

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()  # a packed tensor has no nbytes

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        num_rows = x.numel() // x.shape[-1]
        missing = _num_missing(num_rows)
        if not missing:
            return _product(x, self.rows)
        out = _product(F.pad(x.reshape(num_rows, -1), (0, 0, 0, missing)), self.rows)
        return out[:num_rows].view(*x.shape[:-1], -1)


class FloatTable(PackedTable):
    """Plain float32 rows. Few rows of x are multiplied by a compiled loop, in which the bits of one
    row do not depend on the others. It is faster for a single row; for more, its cost is small
    beside that of the experts that they choose."""

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if len(flat) > FEW_ROWS:
            return product(flat, self.rows).view(*x.shape[:-1], -1)
        sizes = len(flat), *self.rows.shape
        out = flat.new_empty(sizes[:2])
        multiply(flat.data_ptr(), self.rows.data_ptr(), out.data_ptr(), sizes)
        return out.view(*x.shape[:-1], -1)


def product(x: Tensor, rows: Tensor) -> Tensor:
    """x @ rows^T in one dtype, [n, dim] and [out, dim]. A row's result is the same alone and among
    others.
    """
    num_rows = len(x)
    missing = max(_num_missing(num_rows), MIN_ROWS - num_rows)
    return _product(F.pad(x, (0, 0, 0, missing)), rows)[:num_rows]


@functools.lru_cache(4096)  # called for every product of every step
def _num_missing(num_rows: int) -> int:
    return round_up_rows(num_rows, per_octave=ROW_COUNTS) - num_rows


def _product(x: Tensor, rows: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, rows, None, "none", [], "")
    return out


def limit_product_caches() -> None:
    """Bound the caches of oneDNN and torch, unless the environment does. Call it before the first
    product, when both read their variables."""
    for name in CACHE_VARIABLES:
        os.environ.setdefault(name, str(MAX_PRODUCTS))


def can_pack() -> bool:
    """Whether this build of torch has oneDNN."""
    return bool(torch.backends.mkldnn.is_available())
