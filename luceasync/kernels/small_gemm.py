"""Products of up to 64 rows with a large weight matrix, for passes that verify proposed tokens.

Like luceasync.kernels.gemv, for more rows than its tiles can process without reading `x` too often.
The bits of a row do not depend on the other rows or their number.
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
    num_multiprocessors,
    overlap_options,
    shared_bytes,
    start_next,
    wait_for_inputs,
)

MAX_ROWS = 64
STAGES = 5  # of a pipeline that hides memory latency
SUM_BLOCK = 1024  # results that a program sums


@dataclass(frozen=True, slots=True)
class SmallGemmTile:
    """What a program processes at a time: `block_n` weight rows by `block_k` columns. The columns
    are divided among `num_splits` programs, whose results a second kernel sums in order.
    """

    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


def tile(
    num_outputs: int,
    dim: int,
    padded_rows: int,
    *,
    paired: bool,
    element_bytes: int,
    shared_bytes: int,
    num_multiprocessors: int,
) -> SmallGemmTile:
    """The tile for a weight [num_outputs (twice that if paired), dim]. Measured on an H200.

    `block_k` and `num_splits` determine the order of summation: they must not depend on
    `padded_rows`.
    """
    block_n, block_k = 64, 256 // element_bytes
    num_tiles, num_steps = triton.cdiv(num_outputs, block_n), triton.cdiv(dim, block_k)
    # Each split is long enough to fill its pipeline.
    num_splits = 1 if paired else max(1, min(num_multiprocessors // num_tiles, num_steps // STAGES))

    def stage_bytes(block_n: int) -> int:
        return 256 * (block_n * (2 if paired else 1) + padded_rows)

    half = shared_bytes // 2
    if num_tiles * num_splits <= num_multiprocessors:
        # More than half of the memory: a multiprocessor runs one program.
        num_stages = max(STAGES, half // stage_bytes(block_n) + 1)
    else:
        if half < 3 * stage_bytes(block_n) and 3 * stage_bytes(2 * block_n) <= shared_bytes:
            block_n *= 2
        num_stages = max(3, min(STAGES, half // stage_bytes(block_n)))
    num_stages = min(num_stages, shared_bytes // stage_bytes(block_n))
    return SmallGemmTile(block_n, block_k, num_splits, 4, num_stages)


def linear(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    chosen: SmallGemmTile | None = None,
) -> Tensor:
    """x @ weight^T (+ residual).

    x: [rows <= MAX_ROWS, dim]; weight: [outputs, dim], rows contiguous; residual: [rows, outputs].
    Returns [rows, outputs]. `chosen` replaces `tile`.
    """
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    chosen = chosen or _tile(x, weight, num_outputs, paired=False)
    out = x.new_empty(num_rows, num_outputs)
    residual = None if residual is None else residual.contiguous()
    if chosen.num_splits == 1:
        _launch(x, weight, residual, out, chosen, paired=False)
        return out
    parts = out.new_empty(chosen.num_splits, num_rows, num_outputs, dtype=torch.float32)
    _launch(x, weight, None, parts, chosen, paired=False)
    _sum_kernel[(triton.cdiv(out.numel(), SUM_BLOCK),)](
        parts,
        residual,
        out,
        out.numel(),
        NUM_PARTS=chosen.num_splits,
        BLOCK=SUM_BLOCK,
        num_warps=4,
        **overlap_options(x),
    )
    return out


def swiglu(x: Tensor, gate_up: Tensor, *, chosen: SmallGemmTile | None = None) -> Tensor:
    """silu(gate) * up. x: [rows, dim]; gate_up: [2 * inner, dim], gate first. -> [rows, inner]."""
    inner = gate_up.shape[0] // 2
    chosen = chosen or _tile(x, gate_up, inner, paired=True)
    out = x.new_empty(x.shape[0], inner)
    _launch(x, gate_up, None, out, chosen, paired=True)
    return out


def _tile(x: Tensor, weight: Tensor, num_outputs: int, *, paired: bool) -> SmallGemmTile:
    return tile(
        num_outputs,
        x.shape[1],
        _padded(x.shape[0]),
        paired=paired,
        element_bytes=weight.element_size(),
        shared_bytes=shared_bytes(x),
        num_multiprocessors=num_multiprocessors(x),
    )


def _padded(num_rows: int) -> int:
    return max(16, int(triton.next_power_of_2(num_rows)))


def _launch(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    out: Tensor,
    chosen: SmallGemmTile,
    *,
    paired: bool,
) -> None:
    """out: [rows, outputs], or float32 [splits, rows, outputs]."""
    num_rows, dim = x.shape
    assert num_rows <= MAX_ROWS and weight.stride(1) == 1, "few rows, weight rows contiguous"
    num_outputs = out.shape[-1]
    _few_rows_kernel[(triton.cdiv(num_outputs, chosen.block_n), chosen.num_splits)](
        x.contiguous(),
        weight,
        residual,
        out,
        num_rows,
        num_outputs,
        dim,
        weight.stride(0),
        PAIRED=paired,
        EVEN_K=dim % chosen.block_k == 0,
        ROWS=_padded(num_rows),
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        PRECISION=dot_precision(weight.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **overlap_options(x),
    )


@kernel()
def _few_rows_kernel(
    x,
    weight,
    residual,
    out,
    num_rows,
    num_outputs,
    dim,
    weight_stride,
    PAIRED: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < num_outputs
    m = tl.arange(0, ROWS)
    m_ok = m < num_rows
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read row 0: no mask in the loop, and their results are not stored.
    first = weight + tl.where(n_ok, n, 0).to(tl.int64)[:, None] * weight_stride + k[None, :]
    second = first + num_outputs.to(tl.int64) * weight_stride
    columns_at = x + m[None, :] * dim + k[:, None]
    width = tl.cdiv(tl.cdiv(dim, BLOCK_K), tl.num_programs(1)) * BLOCK_K
    begin = split * width
    wait_for_inputs(OVERLAP)

    total = tl.zeros([BLOCK_N, ROWS], tl.float32)  # the weight is the left operand
    other = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for at in range(begin, min(begin + width, dim), BLOCK_K):
        columns_ok = m_ok[None, :] if EVEN_K else m_ok[None, :] & (at + k < dim)[:, None]
        columns = tl.load(columns_at + at, mask=columns_ok, other=0.0)
        if EVEN_K:
            w = tl.load(first + at)
        else:
            w = tl.load(first + at, mask=(at + k < dim)[None, :], other=0.0)
        total = tl.dot(w, columns, total, input_precision=PRECISION)
        if PAIRED:
            if EVEN_K:
                w = tl.load(second + at)
            else:
                w = tl.load(second + at, mask=(at + k < dim)[None, :], other=0.0)
            other = tl.dot(w, columns, other, input_precision=PRECISION)
    # If started earlier, programs would crowd on the multiprocessors that this kernel leaves free.
    start_next(OVERLAP)

    if PAIRED:
        total = total * tl.sigmoid(total) * other
    result = tl.trans(total)  # [ROWS, BLOCK_N]
    place = m[:, None] * num_outputs + n[None, :]
    ok = m_ok[:, None] & n_ok[None, :]
    if residual is not None:
        result += tl.load(residual + place, mask=ok, other=0.0).to(tl.float32)
    out += split.to(tl.int64) * num_rows * num_outputs
    tl.store(out + place, result.to(out.dtype.element_ty), mask=ok)


@kernel()
def _sum_kernel(
    parts,
    residual,
    out,
    size,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < size
    wait_for_inputs(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts + part * size + i, mask=ok, other=0.0)
    if residual is not None:
        total += tl.load(residual + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=ok)
