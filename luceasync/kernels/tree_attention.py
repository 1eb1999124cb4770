"""Attention of trees of rows: flash-decoding (Dao et al., 2023) over the lane's pages, which are
read once for all rows and heads that share them, and over the rows themselves.

Nothing of the lane is written: new keys and values go to scratch rows.
"""

from __future__ import annotations

from dataclasses import dataclass

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

NUM_SPLITS = 32  # programs that share the context of one lane, kv head and block of rows


@dataclass(frozen=True, slots=True)
class TreeAttentionTile:
    """A program processes `block_m` pairs of a row and a query head."""

    block_m: int
    num_warps: int
    num_stages: int


def tile(num_pairs: int, head_dim: int, element_bytes: int, shared_bytes: int) -> TreeAttentionTile:
    """The tile for `num_pairs` (rows times query heads of a kv head) that fits the shared memory.
    Measured on an H200.
    """
    row_bytes = head_dim * element_bytes
    block_m = min(64, max(16, triton.next_power_of_2(num_pairs)))
    while block_m > 16 and (block_m + 3 * PAGE_TOKENS) * row_bytes > shared_bytes:
        block_m //= 2
    num_stages = 2 if (block_m + 5 * PAGE_TOKENS) * row_bytes <= shared_bytes else 1
    return TreeAttentionTile(block_m, num_warps=4, num_stages=num_stages)


def attend_tree(
    projected: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
    keys: Tensor,
    values: Tensor,
    lanes: Tensor,
    row_indices: Tensor,
    tables: Tensor,
    rotation: tuple[Tensor, Tensor],
    ancestors: Tensor,
    new: tuple[Tensor, Tensor],
    *,
    num_heads: int,
    rotary_dim: int,
    gated: bool,
    queries: Tensor | None = None,
) -> Tensor:
    """Let every row attend to the committed rows of its lane, its ancestors and itself.

    projected: [entries, rows, query_dim + 2 kv_dim (+ query_dim of gates)] contiguous; keys,
    values: [lanes, places, kv_heads, head_dim]; lanes: int32 [entries], negative = padding, which
    gives zeros; row_indices: int32 [entries, rows], row 0 at the lane's committed end; tables:
    int32 [lanes, pages]; rotation: cos, sin float32 [entries, rows, rotary_dim / 2]; ancestors:
    bool [entries, rows, rows]; new: keys and values [entries, rows, kv_heads, head_dim] contiguous,
    written; queries: [entries, rows, heads, head_dim] contiguous, written if given. Returns
    [entries, rows, query_dim].
    """
    num_entries, num_rows = row_indices.shape
    num_kv_heads, head_dim = keys.shape[2:]
    group = num_heads // num_kv_heads
    queries = split_heads(
        projected, norms, rotation, new, queries, num_heads=num_heads, rotary_dim=rotary_dim
    )
    shape = (num_entries * num_rows, num_heads, NUM_SPLITS)
    sums = torch.empty(*shape, head_dim, dtype=torch.float32, device=keys.device)
    weights = torch.empty(*shape, 2, dtype=torch.float32, device=keys.device)
    chosen = tile(num_rows * group, head_dim, keys.element_size(), shared_bytes(keys))
    num_blocks = triton.cdiv(num_rows * group, chosen.block_m)
    _attend_tree_kernel[(num_kv_heads * num_blocks, NUM_SPLITS, num_entries)](
        queries,
        *new,
        ancestors.view(torch.uint8),
        keys,
        values,
        lanes,
        row_indices,
        tables,
        sums,
        weights,
        num_rows,
        keys.stride(0),
        tables.stride(0),
        head_dim**-0.5 * 1.4426950408889634,  # scores in base 2
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
    combine((sums, weights), projected.flatten(0, 1), out, lanes, row_indices, num_kv_heads, gated)
    return out.view(num_entries, num_rows, -1)


@triton.jit
def load_new_rows(
    new_keys,
    new_values,
    rows,
    ok,
    kv_head,
    d,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Load keys and values of `rows` [n], as split_heads wrote them: [n, BLOCK_DIM] each."""
    at = (rows * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    ok = ok[:, None] & (d[None, :] < HEAD_DIM)
    k = tl.load(new_keys + at, mask=ok, other=0.0)
    v = tl.load(new_values + at, mask=ok, other=0.0)
    return k, v


@triton.jit
def store_part(sums, weights, part, ok, d, best, weight, total, HEAD_DIM: tl.constexpr):
    """Store the result of a split for `combine`. part, ok, best, weight: [n]."""
    tl.store(weights + part * 2, best, mask=ok)
    tl.store(weights + part * 2 + 1, weight, mask=ok)
    ok = ok[:, None] & (d[None, :] < HEAD_DIM)
    tl.store(sums + part[:, None] * HEAD_DIM + d[None, :], total, mask=ok)


@kernel()
def _attend_tree_kernel(
    queries,
    new_keys,
    new_values,
    ancestors,
    keys,
    values,
    lanes,
    row_indices,
    tables,
    sums,
    weights,
    num_rows,
    lane_stride,
    table_stride,
    scale,
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
    row_index = tl.load(row_indices + entry * num_rows)
    if lane < 0:
        return
    num_chunks, chunks_each = chunks_of_split(row_index, PAGE, SPLITS)
    begin = split * chunks_each
    end = tl.minimum(begin + chunks_each, num_chunks)
    if (begin >= end) & (split > 0):
        return

    m = tl.program_id(0) // NUM_KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUP
    head = kv_head * GROUP + m % GROUP
    m_ok = row < num_rows
    d = tl.arange(0, BLOCK_DIM)
    d_ok = d[None, :] < HEAD_DIM
    own = (entry * num_rows + row) * (NUM_KV_HEADS * GROUP) + head
    at_query = own.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(queries + at_query, mask=m_ok[:, None] & d_ok, other=0.0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)

    if split == 0:
        c = tl.arange(0, BLOCK_ROWS)
        c_ok = c < num_rows
        k_new, v_new = load_new_rows(
            new_keys, new_values, entry * num_rows + c, c_ok, kv_head, d, NUM_KV_HEADS, HEAD_DIM
        )
        square = (entry * num_rows + row)[:, None] * num_rows + c[None, :]
        # Padding rows see everything: their scores may be anything but NaN.
        seen = tl.load(ancestors + square, mask=m_ok[:, None] & c_ok[None, :], other=1)
        seen = (seen > 0) & c_ok[None, :]
        best, weight, total = attend_chunk(
            q, k_new, v_new, seen, scale, best, weight, total, PRECISION
        )

    lane_offset = lane.to(tl.int64) * lane_stride + kv_head * HEAD_DIM
    keys += lane_offset
    values += lane_offset
    table = tables + lane * table_stride
    t = tl.arange(0, PAGE)
    for chunk in range(begin, end):
        t_ok = chunk * PAGE + t < row_index
        at = (tl.load(table + chunk) * PAGE + t).to(tl.int64) * NUM_KV_HEADS * HEAD_DIM
        ok = t_ok[:, None] & d_ok
        k = tl.load(keys + at[:, None] + d[None, :], mask=ok, other=0.0)
        v = tl.load(values + at[:, None] + d[None, :], mask=ok, other=0.0)
        best, weight, total = attend_chunk(
            q, k, v, t_ok[None, :], scale, best, weight, total, PRECISION
        )

    part = own.to(tl.int64) * SPLITS + split
    store_part(sums, weights, part, m_ok, d, best, weight, total, HEAD_DIM)
