"""Products of few rows with a big weight matrix, bound by the bandwidth that reads the weights.

Residual and SwiGLU are fused in. Rows are padded to a tile that multiplies each of them alike, so a
row's result is the same bits whatever the other rows are and however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.overlap import (
    dot_precision,
    overlap_options,
    start_next,
    wait_for_inputs,
)

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program takes at a time: `block_n` weight rows by `split` slices of `block_k` columns.

    Each slice has its own accumulator, so that warps work side by side and not one after another.
    The last `preload` steps of the loop take weights that were loaded before the inputs were ready.
    """

    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int
    preload: int


def tile(num_outputs: int, *, paired: bool, element_bytes: int) -> Tile:
    """The tile for a weight of `num_outputs` rows (twice that if paired). Measured on an H200.

    It must not depend on the number of rows of x: the order of the sums decides a row's bits.
    """
    block_k = 256 // element_bytes
    preload = 0 if num_outputs >= 32768 else 1
    return Tile(16, block_k, 4, 4, 3 if paired else 4, preload)


def linear(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, *, chosen: Tile | None = None
) -> Tensor:
    """x @ weight^T (+ residual).

    x: [rows <= MAX_ROWS, dim]; weight: [outputs, dim], rows contiguous; residual: [rows, outputs].
    Returns [rows, outputs]. `chosen` replaces `tile`.
    """
    return _launch(x, weight, weight.shape[0], residual, chosen, paired=False)


def swiglu(x: Tensor, gate_up: Tensor, *, chosen: Tile | None = None) -> Tensor:
    """silu(gate) * up. x: [rows, dim]; gate_up: [2 * inner, dim], gate first. -> [rows, inner]."""
    return _launch(x, gate_up, gate_up.shape[0] // 2, None, chosen, paired=True)


def _launch(
    x: Tensor,
    weight: Tensor,
    num_outputs: int,
    residual: Tensor | None,
    chosen: Tile | None,
    *,
    paired: bool,
) -> Tensor:
    num_rows, dim = x.shape
    assert num_rows <= MAX_ROWS and weight.stride(1) == 1, "few rows, weight rows contiguous"
    x = x.contiguous()
    out = x.new_empty(num_rows, num_outputs)
    element_bytes = weight.element_size()
    chosen = chosen or tile(num_outputs, paired=paired, element_bytes=element_bytes)
    step = chosen.block_k * chosen.split
    preload = chosen.preload if dim % step == 0 and dim > chosen.preload * step else 0
    _linear_kernel[(triton.cdiv(num_outputs, chosen.block_n),)](
        x,
        weight,
        None if residual is None else residual.contiguous(),
        out,
        num_rows,
        num_outputs,
        dim,
        weight.stride(0),
        PAIRED=paired,
        PRELOAD=preload,
        EVEN_K=dim % step == 0,
        ROWS=8 if num_rows <= 8 and x.is_cuda and torch.version.hip is None else MAX_ROWS,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        SPLIT=chosen.split,
        PRECISION=dot_precision(weight.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **overlap_options(x),
    )
    return out


@triton.jit
def _linear_kernel(
    x,
    weight,
    residual,
    out,
    num_rows,
    num_outputs,
    dim,
    weight_stride,
    PAIRED: tl.constexpr,
    PRELOAD: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < num_outputs
    # Rows past the end read row 0 instead: no mask in the loop, and nothing of them is stored.
    first = weight + tl.where(n_ok, n, 0).to(tl.int64) * weight_stride
    second = first + num_outputs.to(tl.int64) * weight_stride
    TAIL: tl.constexpr = PRELOAD * SPLIT * BLOCK_K
    main = dim - TAIL
    if PRELOAD > 0:
        # Weights come from before this step: they are asked for while the kernel before still runs.
        WIDE: tl.constexpr = PRELOAD * BLOCK_K
        k_tail = tl.arange(0, SPLIT)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        w_tail = tl.load(first[None, :, None] + (main + k_tail)[:, None, :])
        if PAIRED:
            w_tail_second = tl.load(second[None, :, None] + (main + k_tail)[:, None, :])
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)

    m = tl.arange(0, ROWS)
    m_ok = m < num_rows
    place = m[None, :] * num_outputs + n[:, None]
    out_ok = m_ok[None, :] & n_ok[:, None]
    if residual is not None:
        before = tl.load(residual + place, mask=out_ok, other=0.0).to(tl.float32)
    k = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([SPLIT, BLOCK_N, ROWS], tl.float32)  # the weight is the left operand
    other = tl.zeros([SPLIT, BLOCK_N, ROWS], tl.float32)
    if PRELOAD > 0:
        at_tail = x + m[None, None, :] * dim + (main + k_tail)[:, :, None]
        x_tail = tl.load(at_tail, mask=m_ok[None, None, :], other=0.0)
    for begin in range(0, main, SPLIT * BLOCK_K):
        at = begin + k
        at_row = x + m[None, None, :] * dim + at[:, :, None]
        if EVEN_K:
            w = tl.load(first[None, :, None] + at[:, None, :])
            columns = tl.load(at_row, mask=m_ok[None, None, :], other=0.0)
        else:
            w = tl.load(first[None, :, None] + at[:, None, :], mask=(at < dim)[:, None, :], other=0)
            ok = m_ok[None, None, :] & (at < dim)[:, :, None]
            columns = tl.load(at_row, mask=ok, other=0.0)
        total = tl.dot(w, columns, total, input_precision=PRECISION)
        if PAIRED:
            at_second = second[None, :, None] + at[:, None, :]
            if EVEN_K:
                w = tl.load(at_second)
            else:
                w = tl.load(at_second, mask=(at < dim)[:, None, :], other=0)
            other = tl.dot(w, columns, other, input_precision=PRECISION)

    if PRELOAD > 0:
        total = tl.dot(w_tail, x_tail, total, input_precision=PRECISION)
        if PAIRED:
            other = tl.dot(w_tail_second, x_tail, other, input_precision=PRECISION)
    result = tl.sum(total, 0)  # [BLOCK_N, ROWS]
    if PAIRED:
        result = result * tl.sigmoid(result) * tl.sum(other, 0)
    if residual is not None:
        result += before
    tl.store(out + place, result.to(out.dtype.element_ty), mask=out_ok)
