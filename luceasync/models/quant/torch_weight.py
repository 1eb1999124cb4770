"""Products with quantised matrices in torch, for any device: slices of rows are dequantised to
float32 and multiplied. The reference for faster kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.quant.packed import Packed, dequantise, table_of
from luceasync.models.weights import InputNorm, as_float

SLICE_NUMBERS = 1 << 19  # dequantised at once: fits a cache of 2 MiB
Product = Callable[[Tensor, Tensor], Tensor]  # float32 [n, dim], [out, dim] -> [n, out]


class TorchQuantWeight:
    """An EmbeddingTable of quantised rows. Sums are float32, rounded once to the dtype of x."""

    def __init__(
        self,
        packed: Packed,
        dtype: torch.dtype,
        product: Product = F.linear,
        slice_numbers: int = SLICE_NUMBERS,
    ) -> None:
        self.packed = packed
        self._table = table_of(packed)
        self._slice_numbers = slice_numbers
        self._dtype = dtype
        self._product = product

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        flat = x.reshape(-1, x.shape[-1]).float()
        num_rows, num_columns = self.packed.shape
        out = torch.empty((len(flat), num_rows), dtype=x.dtype, device=x.device)
        step = max(1, self._slice_numbers // num_columns)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            numbers = dequantise(self.packed.rows(begin, end), self._table)
            out[:, begin:end] = self._product(flat, numbers)
        return out.view(*x.shape[:-1], num_rows)

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
        rows = dequantise(self.packed.select(ids.reshape(-1)), self._table)
        return rows.to(self._dtype).view(*ids.shape, -1)
