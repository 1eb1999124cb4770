"""Products with quantised matrices on GPUs: for few rows, kernels read the codes; for many, slices
of the matrix are dequantised for the library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from luceasync.kernels import prepared_rows, quant_dequantize, quant_gemv, quant_gemv_cuda
from luceasync.kernels import rows as row_kernels
from luceasync.kernels.prepared_rows import ArrangedRows, FewRows, PreparedRows, WeighedRows
from luceasync.kernels.quant_decode import Coding
from luceasync.kernels.quant_tiles import BLOCK_ROWS, TiledMatrix
from luceasync.models.weights import InputNorm, StackedWeight, SwiGLU, as_float

SLICE_BYTES = 128 << 20  # dequantised at once: a plan counts them as workspace


class TiledQuantWeight:
    """An EmbeddingTable of quantised rows in tiles. For up to MAX_ROWS rows of x no weight is
    rounded; for more, each weight is rounded once to the dtype of x."""

    def __init__(self, tiled: TiledMatrix, num_bytes: int, dtype: torch.dtype) -> None:
        self._tiled = tiled
        self._num_bytes = num_bytes
        self._dtype = dtype
        self._next: InputNorm | None = None

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def num_rows(self) -> int:
        """Rows of the matrix, which are the columns of a product."""
        num_rows: int = self._tiled.num_rows
        return num_rows

    @property
    def coding(self) -> Coding:
        """How its numbers are encoded."""
        coding: Coding = self._tiled.coding
        return coding

    @property
    def tiled(self) -> TiledMatrix:
        """The matrix as read by kernels."""
        return self._tiled

    @property
    def can_gate(self) -> bool:
        """Whether gates and ups are whole blocks of rows, so that one kernel multiplies both."""
        return self.num_rows % (2 * BLOCK_ROWS) == 0

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if quant_gemv_cuda.can_multiply(flat):
            out = quant_gemv_cuda.linear(_prepared(flat, norm, self), self._tiled)
        else:
            flat = flat if norm is None else norm(flat)
            is_few = len(flat) <= quant_gemv.MAX_ROWS
            out = quant_gemv.linear(flat, self._tiled) if is_few else self._many(flat)
        return out.view(*x.shape[:-1], -1)

    def linear_float(
        self, x: Tensor, norm: InputNorm | None = None, out: Tensor | None = None
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if not quant_gemv_cuda.can_multiply(flat):
            return as_float(self.linear(x, norm), out)
        if out is None:
            out = x.new_empty((*x.shape[:-1], self.num_rows), dtype=torch.float32)
        given = _prepared(flat, norm, self)
        quant_gemv_cuda.linear(given, self._tiled, out=out.view(len(flat), -1))
        return out

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) <= quant_gemv.MAX_ROWS:
            before = residual.reshape(-1, residual.shape[-1])
            if quant_gemv_cuda.can_multiply(flat):
                return self.add_few(flat, before).view_as(residual)
            return quant_gemv.linear(flat, self._tiled, before).view_as(residual)
        self.many_into(flat, residual.view(len(flat), -1), adds=True)
        return residual

    def swiglu(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if not self.can_gate:
            out = row_kernels.swiglu(self.linear(flat, norm))
        elif quant_gemv_cuda.can_multiply(flat):
            out = quant_gemv_cuda.swiglu(_prepared(flat, norm, self), self._tiled)
        elif len(flat) <= quant_gemv.MAX_ROWS:
            out = quant_gemv.swiglu(flat if norm is None else norm(flat), self._tiled)
        else:
            out = row_kernels.swiglu(self.linear(flat, norm))
        return out.view(*x.shape[:-1], -1)

    def lookup(self, ids: Tensor) -> Tensor:
        rows = quant_dequantize.lookup(self._tiled, ids.reshape(-1), self._dtype)
        return rows.view(*ids.shape, -1)

    def precede(self, norm: InputNorm) -> None:
        """From now on `linear_add` prepares few rows for `norm`, which comes next."""
        self._next = norm

    def linear_into(self, x: PreparedRows, out: Tensor, *, beside: bool) -> None:
        """`linear` of rows made by `prepared`, into columns of a wider matrix. `beside`: see
        quant_gemv_cuda.linear.
        """
        quant_gemv_cuda.linear(x, self._tiled, out=out, beside=beside)

    def swiglu_for(
        self, flat: Tensor, taker: TiledQuantWeight, norm: InputNorm | None
    ) -> Tensor | FewRows | ArrangedRows:
        """`swiglu` of few rows [rows, dim], arranged for `taker.add_few`."""
        given = _prepared(flat, norm, self)
        return quant_gemv_cuda.swiglu_for(given, self._tiled, taker.coding)

    def wants_arranged(self, residual: Tensor) -> bool:
        """Whether `add_few` to these rows [rows, outputs] expects arranged rows."""
        num_rows = len(residual)
        is_few = prepared_rows.MOST_FEW < num_rows <= prepared_rows.ARRANGED_ROWS
        return is_few and quant_gemv_cuda.can_multiply(residual)

    def wants_few(self, residual: Tensor) -> bool:
        """Whether `add_few` to these rows [rows, outputs] may take them as FewRows."""
        is_few = 1 < len(residual) <= prepared_rows.MOST_FEW
        return is_few and quant_gemv_cuda.can_multiply(residual)

    def add_few(self, x: Tensor | FewRows | ArrangedRows, residual: Tensor) -> Tensor:
        """`linear_add` of few rows, arranged or not: [rows, outputs]."""
        if self._next is None or isinstance(x, ArrangedRows) or len(x) > prepared_rows.MOST_FEW:
            return quant_gemv_cuda.linear(x, self._tiled, residual)
        out, weighed = quant_gemv_cuda.linear_weighed(x, self._tiled, residual, self._next)
        self._next.ahead.put(out, weighed)
        return out

    def many_into(self, flat: Tensor, out: Tensor, *, adds: bool = False) -> None:
        """Write the product of many rows to `out` [rows, outputs], which may be columns of a wider
        matrix, or add it to `out`, in slices of similar sizes."""
        num_rows, num_columns = self._tiled.num_rows, self._tiled.num_columns
        num_slices = -(-num_rows * num_columns * flat.element_size() // SLICE_BYTES)
        step = -(-num_rows // (num_slices * 256)) * 256
        scratch = flat.new_empty(min(step, num_rows), num_columns)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            numbers = scratch[: end - begin]
            quant_dequantize.numbers(self._tiled, begin, end, numbers)
            out[:, begin:end].addmm_(flat, numbers.t(), beta=1 if adds else 0)

    def _many(self, flat: Tensor) -> Tensor:
        out = flat.new_empty(len(flat), self.num_rows)
        self.many_into(flat, out)
        return out


class TiledQuantSwiGLU(SwiGLU):
    """SwiGLU of tiled weights: for few rows, gate_up arranges its result for `down`."""

    def __init__(self, gate_up: TiledQuantWeight, down: TiledQuantWeight) -> None:
        super().__init__(gate_up, down)
        self._gate_up, self._down = gate_up, down

    def add_to(self, x: Tensor, norm: InputNorm) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if not (self._gate_up.can_gate and quant_gemv_cuda.can_multiply(flat)):
            return super().add_to(x, norm)
        inner = self._gate_up.swiglu_for(flat, self._down, norm)
        return self._down.add_few(inner, flat).view_as(x)


class TiledQuantStack(StackedWeight):
    """Tiled segments: each multiplies rows straight into its part of the result."""

    def __init__(self, segments: Sequence[TiledQuantWeight]) -> None:
        super().__init__(segments)
        self._tiled = tuple(segments)
        ends = list(accumulate(segment.num_rows for segment in segments))
        self._ranges = tuple(zip([0, *ends], ends, strict=False))

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) > quant_gemv.MAX_ROWS:
            return self._many(flat if norm is None else norm(flat)).view(*x.shape[:-1], -1)
        if not quant_gemv_cuda.can_multiply(flat):
            return super().linear(x, norm)
        rows = _prepared(flat, norm, *self._tiled)
        out = flat.new_empty(len(flat), self._ranges[-1][1])
        for segment, (begin, end) in zip(self._tiled, self._ranges, strict=True):
            segment.linear_into(rows, out[:, begin:end], beside=begin > 0)
        return out.view(*x.shape[:-1], -1)

    def _many(self, flat: Tensor) -> Tensor:
        out = flat.new_empty(len(flat), self._ranges[-1][1])
        for segment, (begin, end) in zip(self._tiled, self._ranges, strict=True):
            segment.many_into(flat, out[:, begin:end])
        return out


def _prepared(flat: Tensor, norm: InputNorm | None, *weights: TiledQuantWeight) -> PreparedRows:
    """Few rows as all of these weights multiply them; taken from the preceding product if that has
    prepared them."""
    if norm is not None and (ahead := norm.ahead.take(flat)) is not None:
        prepared: WeighedRows = ahead
        return prepared
    return prepared_rows.prepared(flat, [each.coding for each in weights], norm)
