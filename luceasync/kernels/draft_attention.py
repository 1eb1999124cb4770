"""Attention of a drafter's block of rows: flash-decoding (Dao et al., 2023) over the lane's ring of
context, read in place, and over the rows themselves.

What a row sees depends only on numbers on the device, so one captured graph serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.attention import PAGE_TOKENS, attend_chunk, chunks_of_split, combine
from luceasync.kernels.draft_rows import DraftRowTensors
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

NUM_SPLITS = 32  # programs that share the ring of one lane, kv head and block of rows
NO_LIMIT = 1 << 30  # more than any position
LOWEST = tl.constexpr(-1e30)  # below any score, yet differences with it are finite


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """What a row at position p of a block that begins at b sees. Of the context: positions above p
    - `window` and from b - `num_ctx_tokens` on. Of the block: rows nearer than `window`, and if
    `is_causal` none after it. `valid_from` int64 [lanes]: the first position with a key.
    """

    valid_from: Tensor
    window: int = NO_LIMIT
    num_ctx_tokens: int = NO_LIMIT
    is_causal: bool = False


def attend_block(
    projected: Tensor,
    norms: tuple[Tensor, Tensor, float],
    keys: Tensor,
    values: Tensor,
    rows: DraftRowTensors,
    span: Tensor,
    draft_window: DraftWindow,
    *,
    num_heads: int,
) -> Tensor:
    """Let every row attend to the lane's context and to the block, as far as `draft_window` allows.

    projected: [entries, rows, query_dim + 2 kv_dim] contiguous; norms: query and key weight, eps;
    keys, values: [lanes, capacity, kv_heads, head_dim], whose places are contiguous: position p is
    at p % capacity; span: the one of `rows.spans` for that ring. Padding gives zeros. Returns
    [entries, rows, query_dim].
    """
    num_entries, num_rows = rows.positions.shape
    capacity, num_kv_heads, head_dim = keys.shape[1:]
    group = num_heads // num_kv_heads
    new = [projected.new_empty(num_entries, num_rows, num_kv_heads, head_dim) for _ in range(2)]
    queries = split_heads(
        projected, norms, rows.rotation, (new[0], new[1]), num_heads=num_heads, rotary_dim=head_dim
    )
    shape = (num_entries * num_rows, num_heads, NUM_SPLITS)
    sums = torch.empty(*shape, head_dim, dtype=torch.float32, device=keys.device)
    weights = torch.empty(*shape, 2, dtype=torch.float32, device=keys.device)
    chosen = tile(num_rows * group, head_dim, keys.element_size(), shared_bytes(keys))
    num_blocks = triton.cdiv(num_rows * group, chosen.block_m)
    _attend_block_kernel[(num_kv_heads * num_blocks, NUM_SPLITS, num_entries)](
        queries,
        *new,
        keys,
        values,
        rows.lanes,
        rows.positions,
        span,
        draft_window.valid_from,
        sums,
        weights,
        num_rows,
        keys.stride(0),
        capacity,
        draft_window.window,
        draft_window.num_ctx_tokens,
        head_dim**-0.5 * 1.4426950408889634,  # scores in base 2
        CAUSAL=draft_window.is_causal,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_M=chosen.block_m,
        BLOCK_ROWS=max(16, triton.next_power_of_2(num_rows)),
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        PAGE=PAGE_TOKENS,
        SPLITS=NUM_SPLITS,
        PRECISION=dot_precision(keys.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **overlap_options(projected),
    )
    out = projected.new_empty(num_entries * num_rows, num_heads * head_dim)
    combine((sums, weights), projected.flatten(0, 1), out, rows.lanes, span, num_kv_heads, False)
    return out.view(num_entries, num_rows, -1)


@kernel()
def _attend_block_kernel(
    queries,
    new_keys,
    new_values,
    keys,
    values,
    lanes,
    positions,
    spans,
    valid_from,
    sums,
    weights,
    num_rows,
    lane_stride,
    capacity,
    window,
    num_ctx_tokens,
    scale,
    CAUSAL: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
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
    best = tl.full([BLOCK_M], LOWEST, tl.float32)  # a row may see no key of a chunk
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)

    if split == 0:
        c = tl.arange(0, BLOCK_ROWS)
        c_ok = c < num_rows
        k_new, v_new = load_new_rows(
            new_keys, new_values, entry * num_rows + c, c_ok, kv_head, d, NUM_KV_HEADS, HEAD_DIM
        )
        apart = row[:, None] - c[None, :]
        seen = c_ok[None, :] & (tl.abs(apart) < window)
        if CAUSAL:
            seen = seen & (apart >= 0)
        best, weight, total = attend_chunk(
            q, k_new, v_new, seen, scale, best, weight, total, PRECISION
        )

    position = tl.load(positions + entry * num_rows)
    floor = tl.load(valid_from + lane).to(tl.int32)
    floor = tl.maximum(floor, position - num_ctx_tokens)
    oldest = position + row - window  # the newest position that is out of the window
    lane_offset = lane.to(tl.int64) * lane_stride + kv_head * HEAD_DIM
    keys += lane_offset
    values += lane_offset
    t = tl.arange(0, PAGE)
    for chunk in range(begin, end):
        place = chunk * PAGE + t
        key_position = position - 1 - (position - 1 - place) % capacity
        there = (place < span) & (key_position >= floor)
        at = place.to(tl.int64)[:, None] * (NUM_KV_HEADS * HEAD_DIM) + d[None, :]
        ok = there[:, None] & d_ok
        k = tl.load(keys + at, mask=ok, other=0.0)
        v = tl.load(values + at, mask=ok, other=0.0)
        seen = there[None, :] & (key_position[None, :] > oldest[:, None])
        best, weight, total = attend_chunk(q, k, v, seen, scale, best, weight, total, PRECISION)

    part = own.to(tl.int64) * SPLITS + split
    store_part(sums, weights, part, m_ok, d, best, weight, total, HEAD_DIM)
