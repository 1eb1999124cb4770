"""Attention of rows of trees to a window: flash-decoding (Dao et al., 2023) over the lane's ring,
read in place, and over the rows themselves.

A single row is a tree of one row, which may be written to its ring at once; rows of larger trees
only go to scratch. What a row sees depends only on numbers on the device, so one captured graph
serves every position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.attention import PAGE_TOKENS, attend_chunk, chunks_of_split, combine
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import (
    dot_precision,
    overlap_options,
    shared_bytes,
    start_next,
    wait_for_inputs,
)
from luceasync.kernels.rows import split_heads
from luceasync.kernels.tree_attention import load_new_rows, store_part, tile

NUM_SPLITS = 16  # programs that share the ring of one lane, kv head and block of rows
LOWEST = tl.constexpr(-1e30)  # below any score, yet differences with it are finite


def attend_window(
    projected: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
    keys: Tensor,
    values: Tensor,
    lanes: Tensor,
    positions: Tensor,
    spans: Tensor,
    rotation: tuple[Tensor, Tensor],
    ancestors: Tensor,
    new: tuple[Tensor, Tensor],
    *,
    num_heads: int,
    rotary_dim: int,
    gated: bool,
    keeps: bool = False,
) -> Tensor:
    """Let every row attend to the ring's rows, its ancestors and itself, as far as these are less
    than a window away.

    projected: [entries, rows, query_dim + 2 kv_dim (+ query_dim of gates)] contiguous; keys,
    values: [lanes, window, kv_heads, head_dim] contiguous, position p at p % window; lanes: int32
    [entries], negative = padding, which gives zeros; positions: int32 [entries, rows] contiguous,
    row 0 at the lane's committed end; spans: int32 likewise, how many of the ring's rows were ever
    written; rotation: cos, sin float32 [entries, rows, rotary_dim / 2]; ancestors: bool [entries,
    rows, rows]; new: keys and values [entries, rows, kv_heads, head_dim] contiguous, written.
    `keeps`: the one row of each entry is written to its lane's ring. Returns [entries, rows,
    query_dim].
    """
    assert not keeps or positions.shape[1] == 1, "rows of trees may be rejected"
    num_entries, num_rows = positions.shape
    window, num_kv_heads, head_dim = keys.shape[1:]
    group = num_heads // num_kv_heads
    queries = split_heads(
        projected, norms, rotation, new, num_heads=num_heads, rotary_dim=rotary_dim
    )
    shape = (num_entries * num_rows, num_heads, NUM_SPLITS)
    sums = torch.empty(*shape, head_dim, dtype=torch.float32, device=keys.device)
    weights = torch.empty(*shape, 2, dtype=torch.float32, device=keys.device)
    chosen = tile(num_rows * group, head_dim, keys.element_size(), shared_bytes(keys))
    num_blocks = triton.cdiv(num_rows * group, chosen.block_m)
    _attend_window_kernel[(num_kv_heads * num_blocks, NUM_SPLITS, num_entries)](
        queries,
        *new,
        ancestors.view(torch.uint8),
        keys,
        values,
        lanes,
        positions,
        spans,
        sums,
        weights,
        num_rows,
        keys.stride(0),
        head_dim**-0.5 * 1.4426950408889634,  # scores in base 2
        WINDOW=window,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_M=chosen.block_m,
        BLOCK_ROWS=max(16, triton.next_power_of_2(num_rows)),
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        PAGE=PAGE_TOKENS,
        SPLITS=NUM_SPLITS,
        PRECISION=dot_precision(keys.dtype),
        KEEPS=keeps,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **overlap_options(projected),
    )
    out = projected.new_empty(num_entries * num_rows, num_heads * head_dim)
    combine((sums, weights), projected.flatten(0, 1), out, lanes, spans, num_kv_heads, gated)
    return out.view(num_entries, num_rows, -1)


@kernel()
def _attend_window_kernel(
    queries,
    new_keys,
    new_values,
    ancestors,
    keys,
    values,
    lanes,
    positions,
    spans,
    sums,
    weights,
    num_rows,
    lane_stride,
    scale,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    KEEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    entry = tl.program_id(2)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    lane = tl.load(lanes + entry)
    span = tl.load(spans + entry * num_rows)
    if lane < 0:
        return
    num_chunks, chunks_each = chunks_of_split(span, PAGE, SPLITS)
    begin = split * chunks_each
    end = tl.minimum(begin + chunks_each, num_chunks)
    if (begin >= end) & (split > 0):
        return

    m = tl.program_id(0) // NUM_KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUP
    m_ok = row < num_rows
    d = tl.arange(0, BLOCK_DIM)
    d_ok = d[None, :] < HEAD_DIM
    own = (entry * num_rows + row) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
    at_query = own.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(queries + at_query, mask=m_ok[:, None] & d_ok, other=0.0)
    position = tl.load(positions + entry * num_rows + row, mask=m_ok, other=0)
    oldest = (position - WINDOW)[:, None]  # the newest position that is out of the window
    best = tl.full([BLOCK_M], LOWEST, tl.float32)  # a row may see no key of a chunk
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)

    if split == 0:
        c = tl.arange(0, BLOCK_ROWS)
        c_ok = c < num_rows
        k_new, v_new = load_new_rows(
            new_keys, new_values, entry * num_rows + c, c_ok, kv_head, d, NUM_KV_HEADS, HEAD_DIM
        )
        there = tl.load(positions + entry * num_rows + c, mask=c_ok, other=0)
        square = (entry * num_rows + row)[:, None] * num_rows + c[None, :]
        seen = tl.load(ancestors + square, mask=m_ok[:, None] & c_ok[None, :], other=0) > 0
        seen = seen & (there[None, :] > oldest)
        best, weight, total = attend_chunk(
            q, k_new, v_new, seen, scale, best, weight, total, PRECISION
        )

        if KEEPS:
            # No program reads the row in its place, which has just left the window.
            first = (entry * NUM_KV_HEADS + kv_head) * HEAD_DIM + d
            place = tl.load(positions + entry) % WINDOW * NUM_KV_HEADS + kv_head
            at = lane.to(tl.int64) * lane_stride + place * HEAD_DIM + d
            one_ok = d < HEAD_DIM
            tl.store(keys + at, tl.load(new_keys + first, mask=one_ok, other=0.0), mask=one_ok)
            tl.store(values + at, tl.load(new_values + first, mask=one_ok, other=0.0), mask=one_ok)

    last = tl.load(positions + entry * num_rows) - 1
    lane_offset = lane.to(tl.int64) * lane_stride + kv_head * HEAD_DIM
    keys += lane_offset
    values += lane_offset
    t = tl.arange(0, PAGE)
    for chunk in range(begin, end):
        place = chunk * PAGE + t
        is_written = place < span
        # Rows after the newest row's place are one window older.
        key_position = last - (last - place + WINDOW) % WINDOW
        at = place.to(tl.int64)[:, None] * (NUM_KV_HEADS * HEAD_DIM) + d[None, :]
        ok = is_written[:, None] & d_ok
        k = tl.load(keys + at, mask=ok, other=0.0)
        v = tl.load(values + at, mask=ok, other=0.0)
        seen = is_written[None, :] & (key_position[None, :] > oldest)
        best, weight, total = attend_chunk(q, k, v, seen, scale, best, weight, total, PRECISION)

    part = own.to(tl.int64) * SPLITS + split
    store_part(sums, weights, part, m_ok, d, best, weight, total, HEAD_DIM)
