"""Fused row operations between the matrix products of prefill.

RMS norms, SwiGLU and GeGLU, and the work before attention: head norms, rotation, the write into
pages or rings.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.attention import PAGE_TOKENS, normed_and_rotated
from luceasync.kernels.kernel import Kernel, kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

HEAD_ROWS = 16  # rows of one head per program
RING_ROWS = 4  # of a program that copies whole rows


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """x / rms(x) * weight, added to `residual` if given, times `factor` if given. x, residual:
    [rows, dim] contiguous; weight: float32 [dim]; factor: float32 [1].
    """
    out = x.new_empty(x.shape)
    dim = x.shape[1]
    block = triton.next_power_of_2(dim)
    warps = min(max(block // 512, 1), 16)
    _rms_norm_kernel.launch(
        (x.shape[0], 1, 1),
        x,
        weight,
        residual,
        factor,
        out,
        dim,
        eps,
        BLOCK=block,
        num_warps=warps,
        **overlap_options(x),
    )
    return out


def norm_values(projected: Tensor, begin: int, end: int, head_dim: int, eps: float) -> Tensor:
    """The columns before `end`, and behind them the heads of those from `begin` on, each over its
    rms. projected: [rows, width] contiguous -> [rows, end + width - begin].
    """
    num_rows, width = projected.shape
    out = projected.new_empty(num_rows, end + width - begin)
    grid = (triton.cdiv(num_rows, HEAD_ROWS), out.shape[1] // head_dim)
    _norm_values_kernel[grid](
        projected,
        out,
        num_rows,
        width,
        out.shape[1],
        begin,
        end,
        eps,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK_ROWS=HEAD_ROWS,
        num_warps=4,
        **overlap_options(projected),
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [rows, 2 * inner] contiguous, gate first. -> [rows, inner]."""
    return _glu(gate_up, is_gelu=False)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, by gelu's approximation with tanh; as `swiglu`."""
    return _glu(gate_up, is_gelu=True)


def _glu(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    num_rows, width = gate_up.shape
    inner = width // 2
    out = gate_up.new_empty(num_rows, inner)
    _glu_kernel.launch(
        (triton.cdiv(inner, 2048), num_rows, 1),
        gate_up,
        out,
        inner,
        BLOCK=2048,
        IS_GELU=is_gelu,
        num_warps=8,
        **overlap_options(gate_up),
    )
    return out


def write_heads(
    projected: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
    keys: Tensor,
    values: Tensor,
    lanes: Tensor,
    row_indices: Tensor,
    tables: Tensor,
    rotation: tuple[Tensor, Tensor],
    *,
    num_heads: int,
    rotary_dim: int,
) -> Tensor:
    """Norm and rotate query and key heads; write keys and values to their pages.

    projected: [entries, rows, width >= query_dim + 2 kv_dim] contiguous; keys, values: [lanes,
    places, kv_heads, head_dim]; lanes: int32 [entries], negative = padding, skipped; row_indices:
    int32 [entries, rows]; rotation: cos, sin float32 [entries, rows, rotary_dim / 2].
    Returns the queries [entries, rows, heads, head_dim].
    """
    num_entries, num_rows, width = projected.shape
    num_kv_heads, head_dim = keys.shape[2:]
    queries = projected.new_empty(num_entries, num_rows, num_heads, head_dim)
    query_norm, key_norm, eps = norms
    grid = (triton.cdiv(num_rows, HEAD_ROWS), num_heads + 2 * num_kv_heads, num_entries)
    _write_heads_kernel.launch(
        grid,
        projected,
        query_norm,
        key_norm,
        keys,
        values,
        lanes,
        row_indices,
        tables,
        *rotation,
        queries,
        eps,
        num_rows,
        width,
        keys.stride(0),
        tables.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        HALF=rotary_dim // 2,
        PAGE=PAGE_TOKENS,
        BLOCK_ROWS=HEAD_ROWS,
        PAGED=True,
        num_warps=4,
        **overlap_options(projected),
    )
    return queries


def split_heads(
    projected: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
    rotation: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    queries: Tensor | None = None,
    *,
    num_heads: int,
    rotary_dim: int,
) -> Tensor:
    """As `write_heads`, for rows that are not written to pages: `new` keys and values [entries,
    rows, kv_heads, head_dim] contiguous, are written, and `queries` if given. Padding is treated
    like any other row.
    """
    num_entries, num_rows, width = projected.shape
    num_kv_heads, head_dim = new[0].shape[2:]
    if queries is None:
        queries = projected.new_empty(num_entries, num_rows, num_heads, head_dim)
    query_norm, key_norm, eps = norms
    grid = (triton.cdiv(num_rows, HEAD_ROWS), num_heads + 2 * num_kv_heads, num_entries)
    _write_heads_kernel.launch(
        grid,
        projected,
        query_norm,
        key_norm,
        *new,
        None,
        None,
        None,
        *rotation,
        queries,
        eps,
        num_rows,
        width,
        0,
        0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        HALF=rotary_dim // 2,
        PAGE=PAGE_TOKENS,
        BLOCK_ROWS=HEAD_ROWS,
        PAGED=False,
        num_warps=4,
        **overlap_options(projected),
    )
    return queries


def unroll(rings: Sequence[Tensor], begin: Tensor, to: Sequence[Tensor]) -> None:
    """Write what a window before position `begin` still holds, in order of position: the first
    window - 1 rows of each of `to`; zeros before position 0.

    rings: a lane's keys and values [window, kv_heads, head_dim], position p at p % window; begin:
    int32 [1]; to: [window - 1 or more, kv_heads, head_dim]; all contiguous.
    """
    window, width = len(rings[0]), rings[0][0].numel()
    if window > 1:
        _launch_ring(_unroll_kernel, window - 1, rings, begin, to, WINDOW=window, WIDTH=width)


def keep_newest(rings: Sequence[Tensor], begin: Tensor, new: Sequence[Tensor]) -> None:
    """Write rows from position `begin` on to rings; if there are more rows than a ring holds, only
    the newest.

    new: keys and values [rows, kv_heads, head_dim]; the rest as in `unroll`.
    """
    window, width, num_rows = len(rings[0]), rings[0][0].numel(), len(new[0])
    _launch_ring(
        _keep_newest_kernel,
        min(num_rows, window),
        rings,
        begin,
        new,
        num_rows,
        WINDOW=window,
        WIDTH=width,
    )


def _launch_ring(
    of: Kernel,
    num_rows: int,
    rings: Sequence[Tensor],
    begin: Tensor,
    others: Sequence[Tensor],
    *sizes: int,
    WINDOW: int,
    WIDTH: int,
) -> None:
    of.launch(
        (triton.cdiv(num_rows, RING_ROWS), len(rings), 1),
        *rings,
        begin,
        *others,
        *sizes,
        WINDOW=WINDOW,
        WIDTH=WIDTH,
        BLOCK_WIDTH=triton.next_power_of_2(WIDTH),
        BLOCK_ROWS=RING_ROWS,
        num_warps=4,
        **overlap_options(begin),
    )


@kernel()
def _rms_norm_kernel(
    x, weight, residual, factor, out, dim, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * dim
    i = tl.arange(0, BLOCK)
    ok = i < dim
    scale = tl.load(weight + i, mask=ok, other=0.0)
    wait_for_inputs(OVERLAP)
    exact = tl.load(x + row + i, mask=ok, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(exact * exact, 0) / dim + eps)
    normed = (exact * inverse_rms * scale).to(out.dtype.element_ty)
    if residual is not None:
        normed += tl.load(residual + row + i, mask=ok, other=0.0)
    if factor is not None:
        normed *= tl.load(factor).to(out.dtype.element_ty)
    tl.store(out + row + i, normed, mask=ok)


@kernel(do_not_specialize=["num_rows"])
def _norm_values_kernel(
    projected,
    out,
    num_rows,
    width,
    out_width,
    begin,
    end,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(1) * HEAD_DIM
    d = tl.arange(0, BLOCK_DIM)[None, :]
    ok = (row < num_rows) & (d < HEAD_DIM)
    source = tl.where(column < end, column, begin + column - end)
    x = tl.load(projected + row * width + source + d, mask=ok, other=0.0)
    if column >= end:
        exact = x.to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(exact * exact, 1) / HEAD_DIM + eps)
        x = (exact * inverse_rms[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * out_width + column + d, x, mask=ok)


@kernel()
def _glu_kernel(
    gate_up, out, inner, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, OVERLAP: tl.constexpr
):
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < inner
    gate = tl.load(gate_up + row * 2 * inner + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * inner + i, mask=ok, other=0.0).to(tl.float32)
    # gelu's 1 + tanh(z) is 2 sigmoid(2 z), z = sqrt(2 / pi) (gate + 0.044715 gate^3).
    bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    result = gate * tl.sigmoid(bent) * up
    tl.store(out + row * inner + i, result.to(out.dtype.element_ty), mask=ok)


@kernel(do_not_specialize=["num_rows"])
def _write_heads_kernel(
    projected,
    query_norm,
    key_norm,
    keys,
    values,
    lanes,
    row_indices,
    tables,
    cos,
    sin,
    queries,
    eps,
    num_rows,
    width,
    lane_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1)  # query heads, then key heads, then value heads
    entry = tl.program_id(2)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    if PAGED:
        lane = tl.load(lanes + entry)
        if lane < 0:
            return
    t = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    d = tl.arange(0, BLOCK_DIM)[None, :]
    t_ok = t < num_rows
    ok = t_ok & (d < HEAD_DIM)
    row = entry.to(tl.int64) * num_rows + t
    offset = row * width + head * HEAD_DIM
    cos += row * HALF
    sin += row * HALF
    if head < NUM_HEADS:
        q = normed_and_rotated(
            projected, offset, t_ok, d, query_norm, cos, sin, eps, HEAD_DIM, HALF
        )
        tl.store(queries + (row * NUM_HEADS + head) * HEAD_DIM + d, q, mask=ok)
        return
    if PAGED:
        row_index = tl.load(row_indices + row, mask=t_ok, other=0)
        page = tl.load(tables + lane * table_stride + row_index // PAGE)
        place = (page * PAGE + row_index % PAGE).to(tl.int64) * NUM_KV_HEADS
        place = lane.to(tl.int64) * lane_stride + place * HEAD_DIM + d
    else:
        place = row * NUM_KV_HEADS * HEAD_DIM + d
    if head < NUM_HEADS + NUM_KV_HEADS:
        k = normed_and_rotated(projected, offset, t_ok, d, key_norm, cos, sin, eps, HEAD_DIM, HALF)
        tl.store(keys + place + (head - NUM_HEADS) * HEAD_DIM, k, mask=ok)
    else:
        v = tl.load(projected + offset + d, mask=ok, other=0.0)
        tl.store(values + place + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM, v, mask=ok)


@kernel(do_not_specialize=["begin"])
def _unroll_kernel(
    keys,
    values,
    begin,
    to_keys,
    to_values,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    t = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    ok = (t < WINDOW - 1) & (column < WIDTH)
    position = tl.load(begin) + t - (WINDOW - 1)
    source = position % WINDOW * WIDTH + column
    is_written = ok & (position >= 0)
    to = t * WIDTH + column
    if tl.program_id(1) == 0:
        tl.store(to_keys + to, tl.load(keys + source, mask=is_written, other=0.0), mask=ok)
    else:
        tl.store(to_values + to, tl.load(values + source, mask=is_written, other=0.0), mask=ok)


@kernel(do_not_specialize=["begin", "num_rows"])
def _keep_newest_kernel(
    keys,
    values,
    begin,
    new_keys,
    new_values,
    num_rows,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    t = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row = tl.maximum(num_rows - WINDOW, 0) + t
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    ok = (row < num_rows) & (column < WIDTH)
    source = row * WIDTH + column
    to = (tl.load(begin) + row) % WINDOW * WIDTH + column
    if tl.program_id(1) == 0:
        tl.store(keys + to, tl.load(new_keys + source, mask=ok, other=0.0), mask=ok)
    else:
        tl.store(values + to, tl.load(new_values + source, mask=ok, other=0.0), mask=ok)
