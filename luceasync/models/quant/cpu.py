"""Products with quantised matrices on CPUs, by the kernels of luceasync.cyext.quantised.

Knows which layouts the kernels support; TorchQuantWeight is their reference, and handles the other
layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.cyext.quantised import KERNELS, TILE, Matrix
from luceasync.models.quant.layout import QuantLayout
from luceasync.models.quant.packed import DTYPES, Packed
from luceasync.models.weights import InputNorm, StackedWeight, as_float
from luceasync.process_memory import into_large_pages

STEP = 32  # columns that a kernel processes at once
GROUP_STEP = 16  # groups must have a multiple of this many columns for a kernel


def best_kernel() -> str:
    """The fastest kernel that this machine can run; "" if there is none."""
    return ("", *KERNELS)[-1]


def can_multiply(layout: QuantLayout, num_columns: int) -> bool:
    """Whether the kernels take rows of this layout and width."""
    return num_columns % STEP == 0 and (layout.group or num_columns) % GROUP_STEP == 0


class CompiledQuantWeight:
    """An EmbeddingTable of quantised rows, rearranged as tiles in place. Sums are float32, rounded
    once to the dtype of x. The bits of a row do not depend on other rows of x.
    """

    def __init__(self, packed: Packed, dtype: torch.dtype, kernel: str) -> None:
        """Takes over the memory of `packed`. `kernel`: one of luceasync.cyext.quantised.KERNELS."""
        self._packed = packed.contiguous()
        self._num_rows, self._num_columns = self._packed.shape
        self._dtype = dtype
        self._kernel = kernel
        self._matrix = matrix_of(self._packed)
        self._matrix.interleave()
        for tensor in self._packed.tensors.values():
            into_large_pages(tensor.data_ptr(), tensor.nbytes)

    @property
    def num_bytes(self) -> int:
        return self._packed.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        rows, out = self._rows(x), x.new_empty((*x.shape[:-1], self._num_rows))
        self._matrix.multiply(*self._operand(rows), out.data_ptr(), 0, self._kernel)
        return out

    def linear_float(
        self, x: Tensor, norm: InputNorm | None = None, out: Tensor | None = None
    ) -> Tensor:
        return as_float(self.linear(x, norm), out)

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x @ weight^T, rounded once."""
        rows, out = self._rows(x), x.new_empty(residual.shape)
        operand, added = self._operand(rows), residual.to(x.dtype).contiguous()
        assert out.numel() == operand[1] * self._num_rows, (x.shape, residual.shape)
        self._matrix.multiply(*operand, out.data_ptr(), added.data_ptr(), self._kernel)
        return out

    def swiglu(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        """silu(gate) * up, rounded once."""
        x = x if norm is None else norm(x)
        half, rest = divmod(self._num_rows, 2)
        if rest or half % TILE:  # otherwise a tile would have rows of both gate and up
            return StackedWeight([self]).swiglu(x)
        rows, out = self._rows(x), x.new_empty((*x.shape[:-1], half))
        self._matrix.swiglu(*self._operand(rows), out.data_ptr(), self._kernel)
        return out

    def lookup(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1).to(torch.int64).contiguous()
        out = torch.empty(flat.numel(), self._num_columns)
        self._matrix.numbers(flat.data_ptr(), flat.numel(), out.data_ptr())
        return out.to(self._dtype).view(*ids.shape, -1)

    def _rows(self, x: Tensor) -> Tensor:
        """x as contiguous rows. Makes few torch calls, as a decode step calls this for every
        matrix."""
        assert x.shape[-1] == self._num_columns, (x.shape, self._num_columns)
        assert x.dtype in (torch.float32, torch.bfloat16), x.dtype
        return x.contiguous()

    def _operand(self, rows: Tensor) -> tuple[int, int, bool]:
        """(address, number of rows, whether bfloat16). The caller keeps `rows` alive."""
        count = rows.numel() // self._num_columns
        return rows.data_ptr(), count, rows.dtype is torch.bfloat16


def matrix_of(packed: Packed) -> Matrix:
    """The matrix as the kernels see it. It owns no memory: keep `packed` alive."""
    layout, (num_rows, num_columns) = packed.layout, packed.shape
    return Matrix(
        (num_rows, num_columns),
        (layout.group or num_columns, layout.supergroup or num_columns),
        layout.bits,
        (layout.scale, layout.small or "", layout.minimum, _codes(layout)),
        _numbers(layout),
        bool(layout.table),
        layout.divides,
        {name: tensor.data_ptr() for name, tensor in packed.tensors.items()},
    )


def _codes(layout: QuantLayout) -> str:
    if layout.bits < 8:
        return ""
    return "uint8" if layout.codes == "uint" else layout.codes


def _numbers(layout: QuantLayout) -> list[float]:
    """The value of each code; exact in float32 and in bfloat16."""
    if layout.table:
        return [float(number) for number in layout.table]
    if layout.bits < 8:
        return [float(code - layout.zero) for code in range(1 << layout.bits)]
    dtype = DTYPES[_codes(layout)]
    numbers: list[float] = torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist()
    return numbers
