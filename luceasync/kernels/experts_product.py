"""Products of rows with the plain matrices of experts, tile by tile: each tile has rows of one
expert.

In tiles of few rows the bits of a row do not depend on the other rows; they are bound by the
bandwidth of reading each expert once. Tiles of many rows are for prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.experts_routing import TILE_ROWS
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import (
    dot_precision,
    overlap_options,
    shared_bytes,
    start_next,
    wait_for_inputs,
)

MANY_ROWS = 64  # of a tile of prefill


@dataclass(frozen=True, slots=True)
class ExpertsTile:
    """The part of a matrix that a program reads at a time: `block_n` rows by `split` slices of
    `block_k` columns, each with its own sum."""

    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int


def tile(*, paired: bool, element_bytes: int, shared_bytes: int) -> ExpertsTile:
    """The tile for few rows, measured on an H100 and an H200; it does not depend on their
    number.
    """
    block_k, split, block_n = (256 if paired else 512) // element_bytes, 2 if paired else 1, 16
    step_rows = block_n * (2 if paired else 1) + 16
    num_buffers = shared_bytes // (step_rows * split * block_k * element_bytes)
    return ExpertsTile(block_n, block_k, split, 2, min(4 if paired else 3, num_buffers + 1))


def linear(
    x: Tensor,
    matrices: Tensor,
    tiles: Tensor,
    num_places: int,
    *,
    rows: Tensor | None = None,
    shared: Tensor | None = None,
    far: Tensor | None = None,
    is_listed: bool = False,
    chosen: ExpertsTile | None = None,
) -> Tensor:
    """x @ matrix^T of each tile's matrix, for rows at its places: [places, outputs].

    x: [places, dim], or [rows, dim] and `rows`, int32 [places], the row of each place. matrices:
    [experts, outputs, dim]; tiles: see experts_routing.choose. `shared`: [outputs, dim], the matrix
    after all experts. `far`: like `matrices`; tiles made for slots refer to these as the matrices
    after that one. `is_listed`: the launch before this one has waited for the tiles, which are read
    while it runs.
    """
    far = None if far is None else far[None]
    return _product(
        x, matrices[None], tiles, num_places, rows, shared, far, chosen, is_listed=is_listed
    )


def swiglu(
    x: Tensor,
    matrices: Tensor,
    tiles: Tensor,
    rows: Tensor,
    *,
    shared: Tensor | None = None,
    far: Tensor | None = None,
    fills: Tensor | None = None,
    chosen: ExpertsTile | None = None,
) -> Tensor:
    """silu(gate) * up of each place, as `linear`: [places, inner].

    matrices: [2, experts, inner, dim], gates first; shared: [2 * inner, dim]. `fills`: what the
    launch before this one copies to slots, see experts_routing.choose; it has waited for the
    choice.
    """
    return _product(x, matrices, tiles, len(rows), rows, shared, far, chosen, fills=fills)


def _product(
    x: Tensor,
    matrices: Tensor,
    tiles: Tensor,
    num_places: int,
    rows: Tensor | None,
    shared: Tensor | None,
    far: Tensor | None,
    chosen: ExpertsTile | None,
    *,
    is_listed: bool = False,
    fills: Tensor | None = None,
) -> Tensor:
    is_nvidia = x.is_cuda and torch.version.hip is None
    num_parts, num_experts, num_outputs, dim = matrices.shape
    assert matrices.is_contiguous() and (shared is None or shared.is_contiguous())
    paired = num_parts == 2
    num_fills = 0 if fills is None else len(fills)
    x, out = x.contiguous(), x.new_empty(num_places, num_outputs)
    size = matrices.element_size()
    chosen = chosen or tile(paired=paired, element_bytes=size, shared_bytes=shared_bytes(x))
    _few_rows_kernel[(triton.cdiv(num_outputs, chosen.block_n), len(tiles))](
        x,
        matrices,
        shared,
        far,
        rows,
        tiles,
        fills,
        num_fills,
        out,
        num_experts,
        0 if far is None else far.shape[1],
        num_outputs,
        dim,
        FILLS=triton.next_power_of_2(num_fills) if num_fills else 0,
        LISTED=is_listed,
        PAIRED=paired,
        EVEN_K=dim % (chosen.block_k * chosen.split) == 0,
        ROWS=TILE_ROWS if is_nvidia else 16,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        SPLIT=chosen.split,
        PRECISION=dot_precision(matrices.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **overlap_options(x),
    )
    return out


@kernel(do_not_specialize=["num_fills"])
def _few_rows_kernel(
    x,
    matrices,
    shared,
    far,
    rows,
    tiles,
    fills,
    num_fills,
    out,
    num_experts,
    num_far,
    num_outputs,
    dim,
    FILLS: tl.constexpr,
    LISTED: tl.constexpr,
    PAIRED: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    n_ok = n < num_outputs
    # Rows past the end read row 0: no mask in the loop, and their results are not stored.
    own = tl.where(n_ok, n, 0).to(tl.int64) * dim
    k = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    if FILLS == 0 and not LISTED:
        wait_for_inputs(OVERLAP)
        start_next(OVERLAP)
    at_tile = tiles + 3 * tl.program_id(1)
    matrix = tl.load(at_tile, cache_modifier=".cg")  # written while others of a layer ran here
    if matrix >= 0:
        if FILLS > 0:  # only what is being copied to slots is waited for
            fill = tl.arange(0, FILLS)
            at_fill = fills + 2 * fill + 1
            slot = tl.load(at_fill, mask=fill < num_fills, other=-1, cache_modifier=".cg")
            if tl.max((slot == matrix).to(tl.int32), 0) > 0:
                wait_for_inputs(OVERLAP)
            start_next(OVERLAP)
        place = tl.load(at_tile + 1, cache_modifier=".cg") + m
        m_ok = place < tl.load(at_tile + 2, cache_modifier=".cg")
        row = place
        if rows is not None:
            row = tl.load(rows + place, mask=m_ok, other=0)
        size = num_outputs.to(tl.int64) * dim
        first, second = matrices + matrix * size, matrices + (num_experts + matrix) * size
        if shared is not None:
            is_shared = matrix == num_experts
            first = tl.where(is_shared, shared, first)
            second = tl.where(is_shared, shared + size, second)
        if far is not None:
            is_far, number = matrix > num_experts, matrix - num_experts - 1
            first = tl.where(is_far, far + number * size, first)
            second = tl.where(is_far, far + (num_far + number) * size, second)
        if LISTED:
            wait_for_inputs(OVERLAP)
            start_next(OVERLAP)
        first += own
        second += own
        row = row.to(tl.int64) * dim
        total = tl.zeros([SPLIT, BLOCK_N, ROWS], tl.float32)  # the matrix is the left operand
        other = tl.zeros([SPLIT, BLOCK_N, ROWS], tl.float32)
        for begin in range(0, dim, SPLIT * BLOCK_K):
            at = begin + k
            at_row = x + row[None, None, :] + at[:, :, None]
            at_first = first[None, :, None] + at[:, None, :]
            if EVEN_K:
                w = tl.load(at_first)
                columns = tl.load(at_row, mask=m_ok[None, None, :], other=0.0)
            else:
                k_ok = at < dim
                w = tl.load(at_first, mask=k_ok[:, None, :], other=0.0)
                ok = m_ok[None, None, :] & k_ok[:, :, None]
                columns = tl.load(at_row, mask=ok, other=0.0)
            total = tl.dot(w, columns, total, input_precision=PRECISION)
            if PAIRED:
                at_second = second[None, :, None] + at[:, None, :]
                if EVEN_K:
                    w = tl.load(at_second)
                else:
                    w = tl.load(at_second, mask=(at < dim)[:, None, :], other=0.0)
                other = tl.dot(w, columns, other, input_precision=PRECISION)
        result = tl.sum(total, 0)  # [BLOCK_N, ROWS]
        if PAIRED:
            result = result * tl.sigmoid(result) * tl.sum(other, 0)
        at_out = out + place.to(tl.int64)[None, :] * num_outputs + n[:, None]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=m_ok[None, :] & n_ok[:, None])


@dataclass(frozen=True, slots=True)
class ManyRowsTile:
    """A tile of prefill: rows of x by `block_n` rows of a matrix (of gate and of up), `block_k`
    columns at a time.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def many_tile(*, paired: bool, element_bytes: int, shared_bytes: int) -> ManyRowsTile:
    """The tile for MANY_ROWS rows of x, measured on an H100."""
    if element_bytes > 2:
        return ManyRowsTile(32, 32, 4, 2)
    block_n, block_k = 128, 64
    stage_bytes = 2 * block_k * (MANY_ROWS + block_n * (2 if paired else 1))
    return ManyRowsTile(block_n, block_k, 4, max(2, min(4, shared_bytes // stage_bytes)))


def can_group(x: Tensor, matrices: Tensor) -> bool:
    """Whether the library can multiply rows by matrices in groups whose ends stay on the device."""
    if any(size * x.element_size() % 16 for size in matrices.shape[-2:]):
        return False
    is_half = x.dtype == torch.bfloat16 and x.is_cuda and torch.version.hip is None
    return is_half and torch.cuda.get_device_capability(x.device) >= (9, 0)


def many(
    x: Tensor,
    matrices: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    tile_rows: int,
    rows: Tensor | None = None,
    first: int = 0,
    chosen: ManyRowsTile | None = None,
) -> None:
    """`linear` if matrices are [1, experts, outputs, dim], `swiglu` if they are [2, experts, inner,
    dim], in tiles of `tile_rows`.

    `first`: the number of the first of `matrices`; tiles of other matrices are skipped.
    """
    num_parts, num_experts, num_outputs, dim = matrices.shape
    chosen = chosen or many_tile(
        paired=num_parts == 2,
        element_bytes=matrices.element_size(),
        shared_bytes=shared_bytes(x),
    )
    _many_rows_kernel[(triton.cdiv(num_outputs, chosen.block_n), len(tiles))](
        x.contiguous(),
        matrices,
        rows,
        tiles,
        out,
        first,
        num_experts,
        num_outputs,
        dim,
        matrices.stride(0),
        matrices.stride(1),
        matrices.stride(2),
        PAIRED=num_parts == 2,
        EVEN_K=dim % chosen.block_k == 0,
        ROWS=tile_rows,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        PRECISION=dot_precision(matrices.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )


@kernel(do_not_specialize=["first"])
def _many_rows_kernel(
    x,
    matrices,
    rows,
    tiles,
    out,
    first,
    num_experts,
    num_outputs,
    dim,
    part_stride,
    matrix_stride,
    row_stride,
    PAIRED: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    at_tile = tiles + 3 * tl.program_id(1)
    matrix = tl.load(at_tile) - first
    if (matrix >= 0) & (matrix < num_experts):
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_ok = n < num_outputs
        k = tl.arange(0, BLOCK_K)
        place = tl.load(at_tile + 1) + tl.arange(0, ROWS)
        m_ok = place < tl.load(at_tile + 2)
        row = tl.where(m_ok, place, 0)
        if rows is not None:
            row = tl.load(rows + row)
        at_x = x + row.to(tl.int64)[:, None] * dim + k[None, :]
        own = matrices + matrix.to(tl.int64) * matrix_stride
        at_first = own + tl.where(n_ok, n, 0).to(tl.int64)[None, :] * row_stride + k[:, None]
        at_second = at_first + part_stride
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
        other = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for begin in range(0, dim, BLOCK_K):
            ok = begin + k < dim
            if EVEN_K:
                columns, w = tl.load(at_x + begin), tl.load(at_first + begin)
            else:
                columns = tl.load(at_x + begin, mask=ok[None, :], other=0.0)
                w = tl.load(at_first + begin, mask=ok[:, None], other=0.0)
            total = tl.dot(columns, w, total, input_precision=PRECISION)
            if PAIRED:
                if EVEN_K:
                    w = tl.load(at_second + begin)
                else:
                    w = tl.load(at_second + begin, mask=ok[:, None], other=0.0)
                other = tl.dot(columns, w, other, input_precision=PRECISION)
        if PAIRED:
            total = total * tl.sigmoid(total) * other
        at_out = out + place.to(tl.int64)[:, None] * num_outputs + n[None, :]
        tl.store(at_out, total.to(out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])
