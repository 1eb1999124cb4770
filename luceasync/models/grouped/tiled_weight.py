"""Products with quantised matrices on GPUs: kernels that read codes where the rows are few, else
slices of the matrix become plain numbers for the library.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import grouped_numbers, grouped_rows
from luceasync.kernels import rows as row_kernels
from luceasync.kernels.grouped_rows import Tiled

SLICE_BYTES = 128 << 20  # of a matrix that are plain numbers at once: the workspace has room


class TiledGrouped:
    """A Table of quantised rows. Up to MAX_ROWS rows no weight is rounded; beyond, each is once, to
    the dtype of the rows that are multiplied.
    """

    def __init__(self, tiled: Tiled, num_bytes: int, dtype: torch.dtype) -> None:
        self._tiled = tiled
        self._num_bytes = num_bytes
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def dtype(self) -> torch.dtype:
        """See Weight."""
        return self._dtype

    def linear(self, x: Tensor) -> Tensor:
        """See Weight."""
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) <= grouped_rows.MAX_ROWS:
            out = grouped_rows.linear(flat, self._tiled)
        else:
            out = self._many(flat)
        return out.view(*x.shape[:-1], -1)

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See Weight."""
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) <= grouped_rows.MAX_ROWS:
            before = residual.reshape(-1, residual.shape[-1])
            return grouped_rows.linear(flat, self._tiled, before).view_as(residual)
        return residual.add_(self._many(flat).view_as(residual))

    def swiglu(self, x: Tensor) -> Tensor:
        """See Weight."""
        flat = x.reshape(-1, x.shape[-1])
        inner_fits = self._tiled.num_rows % (2 * grouped_rows.BLOCK_ROWS) == 0
        if len(flat) <= grouped_rows.MAX_ROWS and inner_fits:
            out = grouped_rows.swiglu(flat, self._tiled)
        else:
            out = row_kernels.swiglu(self.linear(flat))
        return out.view(*x.shape[:-1], -1)

    def lookup(self, ids: Tensor) -> Tensor:
        """See Table."""
        rows = grouped_numbers.lookup(self._tiled, ids.reshape(-1), self._dtype)
        return rows.view(*ids.shape, -1)

    def _many(self, flat: Tensor) -> Tensor:
        """Products with slices of alike sizes: [rows, outputs]."""
        num_rows, num_columns = self._tiled.num_rows, self._tiled.num_columns
        num_slices = -(-num_rows * num_columns * flat.element_size() // SLICE_BYTES)
        step = -(-num_rows // (num_slices * 256)) * 256
        out = flat.new_empty(len(flat), num_rows)
        scratch = flat.new_empty(min(step, num_rows), num_columns)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            numbers = scratch[: end - begin]
            grouped_numbers.numbers(self._tiled, begin, end, numbers)
            if num_slices == 1:
                return F.linear(flat, numbers)
            # A product into columns of `out` is not what the library would do by itself.
            torch.mm(flat, numbers.t(), out=out[:, begin:end])
        return out
