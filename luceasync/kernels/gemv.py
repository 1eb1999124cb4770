"""Products of few rows with a large weight matrix, bound by the bandwidth of reading the weights.

Residual and SwiGLU are fused in. Rows are padded to a tile that treats each of them alike, so the
bits of a row do not depend on the other rows or their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import (
    dot_precision,
    overlap_options,
    shared_bytes,
    start_next,
    wait_for_inputs,
)

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class GemvTile:
    """What a program takes at a time: `block_n` weight rows by `split` slices of `block_k` columns.

    Each slice has its own accumulator, so that warps work in parallel. `preload`: the weights of
    the last step are loaded before the inputs are ready, while the preceding kernel still runs.
    """

    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int
    preload: bool


def tile(
    num_outputs: int, padded_rows: int, *, paired: bool, element_bytes: int, shared_bytes: int
) -> GemvTile:
    """The tile for a weight of `num_outputs` rows (twice that if paired). Measured on an H200.

    `block_k` and `split` determine the order of summation, and so a row's bits: they must not
    depend on `padded_rows`. The rest may, and fits `shared_bytes` of shared memory.
    """
    block_k, split = 256 // element_bytes, 4
    few = padded_rows < MAX_ROWS
    block_n = 16 if few or paired else 32
    # A weight with few rows has few programs, and each needs more loads in flight.
    num_stages = 4 if num_outputs < 4096 or (not few and not paired) else 3
    step_rows = block_n * (2 if paired else 1) + padded_rows
    num_buffers = shared_bytes // (step_rows * split * block_k * element_bytes)
    # In the many programs of a large weight it would only take registers.
    preload = few and num_outputs < 32768 and num_buffers >= 3
    return GemvTile(block_n, block_k, split, 4, min(num_stages, num_buffers - preload + 1), preload)


def linear(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, *, chosen: GemvTile | None = None
) -> Tensor:
    """x @ weight^T (+ residual).

    x: [rows <= MAX_ROWS, dim]; weight: [outputs, dim], rows contiguous; residual: [rows, outputs].
    Returns [rows, outputs]. `chosen` replaces `tile`.
    """
    return _launch(x, weight, weight.shape[0], residual, chosen, paired=False)


def swiglu(x: Tensor, gate_up: Tensor, *, chosen: GemvTile | None = None) -> Tensor:
    """silu(gate) * up. x: [rows, dim]; gate_up: [2 * inner, dim], gate first. -> [rows, inner]."""
    return _launch(x, gate_up, gate_up.shape[0] // 2, None, chosen, paired=True)


def _launch(
    x: Tensor,
    weight: Tensor,
    num_outputs: int,
    residual: Tensor | None,
    chosen: GemvTile | None,
    *,
    paired: bool,
) -> Tensor:
    num_rows, dim = x.shape
    assert num_rows <= MAX_ROWS and weight.stride(1) == 1, "few rows, weight rows contiguous"
    x = x.contiguous()
    out = x.new_empty(num_rows, num_outputs)
    element_bytes = weight.element_size()
    smallest = 8 if x.is_cuda and torch.version.hip is None else 16
    padded_rows = max(smallest, triton.next_power_of_2(num_rows))
    chosen = chosen or tile(
        num_outputs,
        padded_rows,
        paired=paired,
        element_bytes=element_bytes,
        shared_bytes=shared_bytes(x),
    )
    step = chosen.block_k * chosen.split
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
        PRELOAD=chosen.preload and dim % step == 0,
        EVEN_K=dim % step == 0,
        ROWS=padded_rows,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        SPLIT=chosen.split,
        PRECISION=dot_precision(weight.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **overlap_options(x),
    )
    return out


@kernel()
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
    # Rows past the end read row 0: no mask in the loop, and their results are not stored.
    first = weight + tl.where(n_ok, n, 0).to(tl.int64) * weight_stride
    second = first + num_outputs.to(tl.int64) * weight_stride
    k = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    end = dim
    if PRELOAD:
        end = dim - SPLIT * BLOCK_K
        last_w = tl.load(first[None, :, None] + (end + k)[:, None, :])
        if PAIRED:
            last_w_second = tl.load(second[None, :, None] + (end + k)[:, None, :])
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)

    m = tl.arange(0, ROWS)
    m_ok = m < num_rows
    place = m[None, :] * num_outputs + n[:, None]
    out_ok = m_ok[None, :] & n_ok[:, None]
    if residual is not None:
        before = tl.load(residual + place, mask=out_ok, other=0.0).to(tl.float32)
    total = tl.zeros([SPLIT, BLOCK_N, ROWS], tl.float32)  # the weight is the left operand
    other = tl.zeros([SPLIT, BLOCK_N, ROWS], tl.float32)
    if PRELOAD:
        at_row = x + m[None, None, :] * dim + (end + k)[:, :, None]
        last_columns = tl.load(at_row, mask=m_ok[None, None, :], other=0.0)
    for begin in range(0, end, SPLIT * BLOCK_K):
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

    if PRELOAD:
        total = tl.dot(last_w, last_columns, total, input_precision=PRECISION)
        if PAIRED:
            other = tl.dot(last_w_second, last_columns, other, input_precision=PRECISION)
    result = tl.sum(total, 0)  # [BLOCK_N, ROWS]
    if PAIRED:
        result = result * tl.sigmoid(result) * tl.sum(other, 0)
    if residual is not None:
        result += before
    tl.store(out + place, result.to(out.dtype.element_ty), mask=out_ok)
