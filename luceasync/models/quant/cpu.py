"""Products with quantised matrices on CPUs, by the kernels of luceasync.cyext.grouped.

Knows which layouts these take. TorchGrouped is their truth, and multiplies elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.cyext.grouped import KERNELS, TILE, Matrix
from luceasync.models.quant.layout import QuantLayout
from luceasync.models.quant.packed import DTYPES, Packed
from luceasync.models.weights import InputNorm, StackedWeight, as_float
from luceasync.process_memory import into_large_pages

STEP = 32  # columns that a kernel takes at once
GROUP_STEP = 16  # columns that share a scale there


def best_kernel() -> str:
    """The fastest instructions of this machine that there are kernels for; "": none."""
    return ("", *KERNELS)[-1]


def can_multiply(layout: QuantLayout, num_columns: int) -> bool:
    """Whether the kernels take rows of that layout and width."""
    return num_columns % STEP == 0 and (layout.group or num_columns) % GROUP_STEP == 0


class CompiledQuantWeight:
    """A Table of quantised rows, in tiles where they lay. Sums are float32, rounded once to the
    dtype of the rows that are multiplied; a row's bits are the same whatever rows are beside it.
    """

    def __init__(self, packed: Packed, dtype: torch.dtype, kernel: str) -> None:
        """The memory of `packed` is given away. `kernel`: one of luceasync.cyext.grouped."""
        self._packed = packed.contiguous()
        self._num_rows, self._num_columns = self._packed.shape
        self._dtype = dtype
        self._kernel = kernel
        self._matrix = _matrix(self._packed)
        self._matrix.interleave()
        for tensor in self._packed.tensors.values():
            into_large_pages(tensor.data_ptr(), tensor.nbytes)

    @property
    def num_bytes(self) -> int:
        return self._packed.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        """See Weight."""
        return self._dtype

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        """See Weight."""
        x = x if norm is None else norm(x)
        rows, out = self._rows(x), x.new_empty((*x.shape[:-1], self._num_rows))
        self._matrix.multiply(*self._given(rows), out.data_ptr(), 0, self._kernel)
        return out

    def linear_float(
        self, x: Tensor, norm: InputNorm | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See Weight."""
        return as_float(self.linear(x, norm), out)

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See Weight; rounded once, after both are added."""
        rows, out = self._rows(x), x.new_empty(residual.shape)
        given, added = self._given(rows), residual.to(x.dtype).contiguous()
        assert out.numel() == given[1] * self._num_rows, (x.shape, residual.shape)
        self._matrix.multiply(*given, out.data_ptr(), added.data_ptr(), self._kernel)
        return out

    def swiglu(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        """See Weight; rounded once."""
        x = x if norm is None else norm(x)
        half, rest = divmod(self._num_rows, 2)
        if rest or half % TILE:  # a tile would have rows of both
            return StackedWeight([self]).swiglu(x)
        rows, out = self._rows(x), x.new_empty((*x.shape[:-1], half))
        self._matrix.swiglu(*self._given(rows), out.data_ptr(), self._kernel)
        return out

    def lookup(self, ids: Tensor) -> Tensor:
        """See Table."""
        flat = ids.reshape(-1).to(torch.int64).contiguous()
        out = torch.empty(flat.numel(), self._num_columns)
        self._matrix.numbers(flat.data_ptr(), flat.numel(), out.data_ptr())
        return out.to(self._dtype).view(*ids.shape, -1)

    def _rows(self, x: Tensor) -> Tensor:
        """x in one piece. Few calls of torch: a decode step comes here for every matrix."""
        assert x.shape[-1] == self._num_columns, (x.shape, self._num_columns)
        assert x.dtype in (torch.float32, torch.bfloat16), x.dtype
        return x.contiguous()

    def _given(self, rows: Tensor) -> tuple[int, int, bool]:
        """How a product is told of them; who asks holds them while they are read."""
        count = rows.numel() // self._num_columns
        return rows.data_ptr(), count, rows.dtype is torch.bfloat16


def _matrix(packed: Packed) -> Matrix:
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
    """What each code stands for, in float32 and in bfloat16 alike."""
    if layout.table:
        return [float(number) for number in layout.table]
    if layout.bits < 8:
        return [float(code - layout.zero) for code in range(1 << layout.bits)]
    dtype = DTYPES[_codes(layout)]
    numbers: list[float] = torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist()
    return numbers
