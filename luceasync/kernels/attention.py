"""Attention of one new row per lane: head norms, rotation, the write into the lane's page, and
flash-decoding (Dao et al., 2023) over the lane's pages.

The split of the context depends only on its length, which is read on the device: one captured graph
serves every length, and a row's result does not depend on the other lanes.
"""

from __future__ import annotations

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

PAGE_TOKENS = 64
NUM_SPLITS = 64  # programs that share the context of one lane and kv head


def attend(
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
    gated: bool,
    ring: Tensor | None = None,
) -> Tensor:
    """Write the key and value row of each entry, and attend to all resident rows up to it.

    projected: [entries, query_dim + 2 kv_dim (+ query_dim of gates)]; norms: query and key weight,
    eps; keys, values: [lanes, places, kv_heads, head_dim]; lanes: int32 [entries], negative =
    padding, which gives zeros; row_indices: int32 [entries]; tables: int32 [lanes, pages];
    rotation: cos, sin float32 [entries, rotary_dim / 2]; ring: [lanes, newest, heads, head_dim]
    contiguous, where the query of row r is written to r % newest. Returns [entries, query_dim].
    """
    num_entries = projected.shape[0]
    num_kv_heads, head_dim = keys.shape[2:]
    group = num_heads // num_kv_heads
    shape = (num_entries, num_heads, NUM_SPLITS)
    sums = torch.empty(*shape, head_dim, dtype=torch.float32, device=keys.device)
    weights = torch.empty(*shape, 2, dtype=torch.float32, device=keys.device)
    out = projected.new_empty(num_entries, num_heads * head_dim)
    query_norm, key_norm, eps = norms
    _attend_kernel[(num_kv_heads, NUM_SPLITS, num_entries)](
        projected,
        query_norm,
        key_norm,
        keys,
        values,
        lanes,
        row_indices,
        tables,
        *rotation,
        ring,
        sums,
        weights,
        eps,
        projected.stride(0),
        keys.stride(0),
        tables.stride(0),
        head_dim**-0.5 * 1.4426950408889634,  # scores in base 2
        NEWEST=0 if ring is None else ring.shape[1],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        HALF=rotary_dim // 2,
        PAGE=PAGE_TOKENS,
        SPLITS=NUM_SPLITS,
        PRECISION=dot_precision(keys.dtype),
        num_warps=8 if head_dim * keys.element_size() > 512 else 4,
        num_stages=2 if shared_bytes(keys) > 170 * head_dim * keys.element_size() else 1,
        **overlap_options(projected),
    )
    combine((sums, weights), projected, out, lanes, row_indices[:, None], num_kv_heads, gated)
    return out


def combine(
    parts: tuple[Tensor, Tensor],
    projected: Tensor,
    out: Tensor,
    lanes: Tensor,
    row_indices: Tensor,
    num_kv_heads: int,
    gated: bool,
) -> None:
    """Merge the softmaxes of all splits, apply the gate, and write `out` [rows of all entries,
    query_dim].

    parts: of each split, its sum of values [rows, heads, splits, head_dim], and its highest score
    and total weight [rows, heads, splits, 2]; row_indices: int32 [entries, rows each]; that of an
    entry's first row is the number of tokens that were split.
    """
    sums, weights = parts
    num_rows, num_heads, num_splits, head_dim = sums.shape
    _combine_kernel[(num_heads, num_rows)](
        sums,
        weights,
        projected,
        out,
        lanes,
        row_indices,
        row_indices.shape[1],
        projected.stride(0),
        (num_heads + 2 * num_kv_heads) * head_dim,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        PAGE=PAGE_TOKENS,
        SPLITS=num_splits,
        GATED=gated,
        num_warps=4,
        **overlap_options(projected),
    )


@triton.jit
def normed_and_rotated(
    heads, offset, ok, dim, norm, cos, sin, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr
):
    """RMS norm over the last axis (norm None: none), then rotation; both round to the heads' dtype.

    `heads` + `offset` [n, 1] points to the heads; dim: [1, BLOCK_DIM]; cos, sin: pointers, one or
    [n, 1], to HALF numbers each. Dimension d rotates with d + HALF.
    """
    dtype = heads.dtype.element_ty
    ok = ok & (dim < HEAD_DIM)
    turns = dim < 2 * HALF
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    angle = tl.where(dim < HALF, dim, dim - HALF)
    # All loads precede the first sum, which would delay them.
    x = tl.load(heads + offset + dim, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(heads + offset + partner, mask=ok & turns, other=0.0).to(tl.float32)
    if norm is not None:
        own_norm = tl.load(norm + dim, mask=dim < HEAD_DIM, other=0.0)
        partner_norm = tl.load(norm + partner, mask=turns, other=0.0)
    c = tl.load(cos + angle, mask=ok & turns, other=1.0)
    s = tl.load(sin + angle, mask=ok & turns, other=0.0)
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * inverse_rms * own_norm
        y = (y * inverse_rms * partner_norm).to(dtype).to(tl.float32)
    own = x.to(dtype)
    y = tl.where(dim < HALF, -y, y)
    return tl.where(turns, (own.to(tl.float32) * c + y * s).to(dtype), own)


@triton.jit
def chunks_of_split(row_index, PAGE: tl.constexpr, SPLITS: tl.constexpr):
    """(number of chunks that hold the rows before `row_index`, chunks of each split)."""
    num_chunks = (row_index + PAGE - 1) // PAGE
    return num_chunks, tl.maximum((num_chunks + SPLITS - 1) // SPLITS, 1)


@triton.jit
def _rows_of_chunk(
    table,
    chunk,
    is_there,
    row_index,
    t,
    d,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The offsets of rows `t` of a chunk, [page, dim], and a mask of those before `row_index`."""
    place = tl.load(table + chunk, mask=is_there, other=0) * PAGE + t
    at = place.to(tl.int64)[:, None] * (NUM_KV_HEADS * HEAD_DIM) + d[None, :]
    return at, ((chunk * PAGE + t < row_index) & is_there)[:, None] & (d[None, :] < HEAD_DIM)


@triton.jit
def _write_new_row(
    row,
    key_offset,
    kv_dim,
    keys,
    values,
    place,
    dim,
    key_norm,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Write the row's key and value and return both [1, BLOCK_DIM].

    The row attends to itself from here, and reads the cache strictly below its row_index.
    """
    ok = dim < HEAD_DIM
    one = tl.arange(0, 1)[:, None]
    k = normed_and_rotated(
        row, key_offset + one, one == 0, dim, key_norm, cos, sin, eps, HEAD_DIM, HALF
    )
    v = tl.load(row + key_offset + one + kv_dim + dim, mask=ok, other=0.0)
    at = place.to(tl.int64) * kv_dim + dim
    tl.store(keys + at, k, mask=ok)
    tl.store(values + at, v, mask=ok)
    return k, v


@triton.jit
def attend_chunk(q, k, v, seen, scale, best, weight, total, PRECISION: tl.constexpr):
    """One chunk's part of an online softmax in base 2.

    q: [group, dim]; k, v: [page, dim]; seen: [group or 1, page], with at least one row for each
    of the group in the first chunk.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [group, page]
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    p = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(best - higher)
    weight = weight * shrink + tl.sum(p, 1)
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
    return higher, weight, total


@kernel()
def _attend_kernel(
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
    ring,
    sums,
    weights,
    eps,
    projected_stride,
    lane_stride,
    table_stride,
    scale,
    NEWEST: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    entry = tl.program_id(2)
    start_next(OVERLAP)
    # Earlier rows were written before the preceding kernel started its work, because that kernel
    # waited for all work before it.
    lane = tl.load(lanes + entry)
    row_index = tl.load(row_indices + entry)
    num_chunks, chunks_each = chunks_of_split(row_index, PAGE, SPLITS)
    begin = split * chunks_each
    end = tl.where(lane < 0, begin, tl.minimum(begin + chunks_each, num_chunks))
    d = tl.arange(0, BLOCK_DIM)
    t = tl.arange(0, PAGE)
    lane_offset = lane.to(tl.int64) * lane_stride + kv_head * HEAD_DIM
    keys += lane_offset
    values += lane_offset
    table = tables + lane * table_stride
    if OVERLAP:
        at, ok = _rows_of_chunk(
            table, begin, begin < end, row_index, t, d, NUM_KV_HEADS, HEAD_DIM, PAGE
        )
        first_k = tl.load(keys + at, mask=ok, other=0.0)
        first_v = tl.load(values + at, mask=ok, other=0.0)
    wait_for_inputs(OVERLAP)
    if (lane < 0) | ((begin >= end) & (split > 0)):
        return

    g = tl.arange(0, BLOCK_GROUP)
    g_ok = g < GROUP
    row = projected + entry.to(tl.int64) * projected_stride
    cos += entry * HALF
    sin += entry * HALF
    offset = (kv_head * GROUP + g) * HEAD_DIM
    q = normed_and_rotated(
        row, offset[:, None], g_ok[:, None], d[None, :], query_norm, cos, sin, eps, HEAD_DIM, HALF
    )  # [group, head_dim]
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    total = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)

    if split == 0:
        if NEWEST:
            place = lane.to(tl.int64) * NEWEST + row_index % NEWEST
            at_query = (place * NUM_HEADS * HEAD_DIM + offset)[:, None] + d[None, :]
            tl.store(ring + at_query, q, mask=g_ok[:, None] & (d[None, :] < HEAD_DIM))
        k_new, v_new = _write_new_row(
            row,
            (NUM_HEADS + kv_head) * HEAD_DIM,
            NUM_KV_HEADS * HEAD_DIM,
            keys,
            values,
            tl.load(table + row_index // PAGE) * PAGE + row_index % PAGE,
            d[None, :],
            key_norm,
            cos,
            sin,
            eps,
            HEAD_DIM,
            HALF,
        )
        best = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
        weight = tl.full([BLOCK_GROUP], 1.0, tl.float32)
        total += v_new.to(tl.float32)

    if OVERLAP:
        if begin < end:
            seen = (begin * PAGE + t < row_index)[None, :]
            best, weight, total = attend_chunk(
                q, first_k, first_v, seen, scale, best, weight, total, PRECISION
            )
        begin += 1
    for chunk in range(begin, end):
        at, ok = _rows_of_chunk(table, chunk, True, row_index, t, d, NUM_KV_HEADS, HEAD_DIM, PAGE)
        k = tl.load(keys + at, mask=ok, other=0.0)
        v = tl.load(values + at, mask=ok, other=0.0)
        seen = (chunk * PAGE + t < row_index)[None, :]
        best, weight, total = attend_chunk(q, k, v, seen, scale, best, weight, total, PRECISION)

    part = (entry * NUM_HEADS + kv_head * GROUP + g) * SPLITS + split
    tl.store(weights + part * 2, best, mask=g_ok)
    tl.store(weights + part * 2 + 1, weight, mask=g_ok)
    ok = g_ok[:, None] & (d[None, :] < HEAD_DIM)
    tl.store(sums + part[:, None] * HEAD_DIM + d[None, :], total, mask=ok)


@kernel()
def _combine_kernel(
    sums,
    weights,
    projected,
    out,
    lanes,
    row_indices,
    rows_each,
    projected_stride,
    gate_offset,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    entry = row // rows_each
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    d = tl.arange(0, BLOCK_DIM)
    d_ok = d < HEAD_DIM
    out += (row * NUM_HEADS + head) * HEAD_DIM
    row_index = tl.load(row_indices + entry * rows_each)
    if GATED:  # all loads precede the first sum, which would delay them
        at = row.to(tl.int64) * projected_stride + gate_offset + head * HEAD_DIM + d
        gate = tl.load(projected + at, mask=d_ok, other=0.0).to(tl.float32)
    if tl.load(lanes + entry) < 0:
        tl.store(out + d, tl.zeros([BLOCK_DIM], out.dtype.element_ty), mask=d_ok)
        return
    num_chunks, chunks_each = chunks_of_split(row_index, PAGE, SPLITS)
    num_used = tl.maximum((num_chunks + chunks_each - 1) // chunks_each, 1)
    s = tl.arange(0, SPLITS)
    s_ok = s < num_used
    part = (row * NUM_HEADS + head).to(tl.int64) * SPLITS + s
    best = tl.load(weights + part * 2, mask=s_ok, other=float("-inf"))
    weight = tl.load(weights + part * 2 + 1, mask=s_ok, other=0.0)
    ok = s_ok[:, None] & d_ok[None, :]
    total = tl.load(sums + part[:, None] * HEAD_DIM + d[None, :], mask=ok, other=0.0)
    share = tl.exp2(best - tl.max(best, 0))
    result = tl.sum(total * share[:, None], 0) / tl.sum(weight * share, 0)
    if GATED:
        result *= tl.sigmoid(gate)
    tl.store(out + d, result.to(out.dtype.element_ty), mask=d_ok)
