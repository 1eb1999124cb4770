"""What a verify pass left behind becomes state along each entry's accepted path: one kernel for
each kind of state, over all layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.attention import PAGE_TOKENS
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import dot_precision

CONV_BLOCK = 512  # channels of one program
BLOCK_VALUE = 32  # columns of the state in one program


def commit_attention(
    scratch: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    lanes: Tensor,
    begins: Tensor,
    rows: Tensor,
    counts: Tensor,
    tables: Tensor,
) -> None:
    """Copy accepted rows to the places of the ranks from `begins` on.

    scratch: keys and values [layers, entries, rows, kv_heads, head_dim]; keys, values: [layers,
    lanes, places, kv_heads, head_dim], written; lanes (negative: padding), begins, counts: int32
    [entries]; rows: int32 [entries, rows], of which `counts` are accepted; tables: int32 [lanes,
    pages].
    """
    num_layers, num_entries, num_rows, num_kv_heads, head_dim = scratch[0].shape
    width = num_kv_heads * head_dim
    _commit_attention_kernel[(num_rows, num_entries, num_layers)](
        *scratch,
        keys,
        values,
        lanes,
        begins,
        rows,
        counts,
        tables,
        scratch[0].stride(0),
        keys.stride(0),
        keys.stride(1),
        tables.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        PAGE=PAGE_TOKENS,
        num_warps=4,
    )


def commit_recent(
    scratch: Tensor, ring: Tensor, lanes: Tensor, begins: Tensor, rows: Tensor, counts: Tensor
) -> None:
    """Copy accepted rows to a lane's ring of the newest: rank r to place r % newest.

    scratch: [layers, entries, rows, ...]; ring: [layers, lanes, newest, ...], written; the rest as
    in `commit_attention`.
    """
    num_layers, num_entries, num_rows = scratch.shape[:3]
    width = scratch[0, 0, 0].numel()
    _commit_recent_kernel[(num_rows, num_entries, num_layers)](
        scratch,
        ring,
        lanes,
        begins,
        rows,
        counts,
        scratch.stride(0),
        ring.stride(0),
        NEWEST=ring.shape[2],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )


def commit_delta(
    scratch: tuple[Tensor, Tensor, Tensor, Tensor],
    conv_state: Tensor,
    delta_state: Tensor,
    lanes: Tensor,
    rows: Tensor,
    counts: Tensor,
) -> None:
    """Move both states on along the accepted rows.

    scratch: as luceasync.kernels.tree_delta.delta_tree writes it, with the layers in front;
    conv_state: [layers, lanes, kernel - 1, channels]; delta_state: float32 [layers, lanes,
    value_heads, key_dim, value_dim]; the rest as in `commit_attention`.
    """
    inputs, keys, updates, totals = scratch
    num_layers, num_entries, num_rows, channels = inputs.shape
    window = conv_state.shape[2]
    path = (lanes, rows, counts, num_rows)
    _commit_conv_kernel[(triton.cdiv(channels, CONV_BLOCK), num_entries, num_layers)](
        inputs,
        conv_state,
        *path,
        channels,
        inputs.stride(0),
        conv_state.stride(0),
        WINDOW=window,
        BLOCK_WINDOW=triton.next_power_of_2(max(window, 1)),
        BLOCK=CONV_BLOCK,
        num_warps=4,
    )
    num_heads, key_dim, value_dim = delta_state.shape[2:]
    num_blocks = triton.cdiv(value_dim, BLOCK_VALUE)
    _commit_delta_kernel[(num_heads * num_blocks, num_entries, num_layers)](
        keys,
        updates,
        totals,
        delta_state,
        *path,
        keys.stride(0),
        updates.stride(0),
        totals.stride(0),
        delta_state.stride(0),
        NUM_KEY_HEADS=keys.shape[3],
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_VALUE=BLOCK_VALUE,
        BLOCK_ROWS=max(16, triton.next_power_of_2(num_rows)),
        PRECISION=dot_precision(torch.float32),
        num_warps=4,
        num_stages=1,
    )


@kernel()
def _commit_attention_kernel(
    new_keys,
    new_values,
    keys,
    values,
    lanes,
    begins,
    rows,
    counts,
    tables,
    scratch_stride,
    layer_stride,
    lane_stride,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    step = tl.program_id(0)
    entry = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    lane = tl.load(lanes + entry)
    if (lane < 0) | (step >= tl.load(counts + entry)):
        return
    first = entry * tl.num_programs(0)
    row = first + tl.load(rows + first + step)
    rank = tl.load(begins + entry) + step
    place = tl.load(tables + lane * table_stride + rank // PAGE) * PAGE + rank % PAGE
    d = tl.arange(0, BLOCK)
    ok = d < WIDTH
    source = layer * scratch_stride + row.to(tl.int64) * WIDTH + d
    target = layer * layer_stride + lane.to(tl.int64) * lane_stride + place.to(tl.int64) * WIDTH + d
    k = tl.load(new_keys + source, mask=ok, other=0.0)
    v = tl.load(new_values + source, mask=ok, other=0.0)
    tl.store(keys + target, k, mask=ok)
    tl.store(values + target, v, mask=ok)


@kernel()
def _commit_recent_kernel(
    scratch,
    ring,
    lanes,
    begins,
    rows,
    counts,
    scratch_stride,
    layer_stride,
    NEWEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.program_id(0)
    entry = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    lane = tl.load(lanes + entry)
    count = tl.load(counts + entry)
    if (lane < 0) | (step >= count) | (step < count - NEWEST):
        return
    first = entry * tl.num_programs(0)
    row = first + tl.load(rows + first + step)
    place = lane.to(tl.int64) * NEWEST + (tl.load(begins + entry) + step) % NEWEST
    d = tl.arange(0, BLOCK)
    ok = d < WIDTH
    q = tl.load(scratch + layer * scratch_stride + row.to(tl.int64) * WIDTH + d, mask=ok, other=0.0)
    tl.store(ring + layer * layer_stride + place * WIDTH + d, q, mask=ok)


@kernel()
def _commit_conv_kernel(
    inputs,
    conv_state,
    lanes,
    rows,
    counts,
    num_rows,
    channels,
    scratch_stride,
    layer_stride,
    WINDOW: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    lane = tl.load(lanes + entry)
    count = tl.load(counts + entry)
    if (lane < 0) | (count == 0):
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    w = tl.arange(0, BLOCK_WINDOW)
    w_ok = w < WINDOW
    ok = w_ok[:, None] & (c < channels)
    state = conv_state + layer * layer_stride + lane.to(tl.int64) * WINDOW * channels
    # The newest WINDOW of the committed inputs followed by those of the path.
    at = w + count
    step = at - WINDOW
    row = tl.load(rows + entry * num_rows + step, mask=w_ok & (step >= 0), other=0)
    row = (entry * num_rows + row).to(tl.int64)[:, None]
    source = inputs + layer * scratch_stride + row * channels + c
    new = tl.load(source, mask=ok & (step >= 0)[:, None], other=0.0)
    old = tl.load(state + at[:, None] * channels + c, mask=ok & (step < 0)[:, None], other=0.0)
    tl.debug_barrier()  # every thread has read what the store replaces
    tl.store(state + w[:, None] * channels + c, tl.where((step >= 0)[:, None], new, old), mask=ok)


@kernel()
def _commit_delta_kernel(
    keys,
    updates,
    totals,
    delta_state,
    lanes,
    rows,
    counts,
    num_rows,
    key_stride,
    update_stride,
    total_stride,
    layer_stride,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0) % NUM_HEADS
    entry = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    lane = tl.load(lanes + entry)
    count = tl.load(counts + entry)
    if (lane < 0) | (count == 0):
        return
    i = tl.arange(0, BLOCK_KEY)
    j = tl.program_id(0) // NUM_HEADS * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    i_ok = i < KEY_DIM
    j_ok = (j < VALUE_DIM)[None, :]
    at_state = layer * layer_stride + (lane.to(tl.int64) * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    at_state = delta_state + at_state + i[:, None] * VALUE_DIM + j[None, :]
    state = tl.load(at_state, mask=i_ok[:, None] & j_ok, other=0.0)

    p = tl.arange(0, BLOCK_ROWS)
    p_ok = p < count
    row = tl.load(rows + entry * num_rows + p, mask=p_ok, other=0)
    row = (entry * num_rows + row).to(tl.int64)
    at = totals + layer * total_stride + row * NUM_HEADS + head
    total = tl.load(at, mask=p_ok, other=0.0)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    at = layer * key_stride + (row * NUM_KEY_HEADS + key_head)[:, None] * KEY_DIM + i[None, :]
    k = tl.load(keys + at, mask=p_ok[:, None] & i_ok[None, :], other=0.0)
    at = layer * update_stride + (row * NUM_HEADS + head)[:, None] * VALUE_DIM + j[None, :]
    u = tl.load(updates + at, mask=p_ok[:, None] & j_ok, other=0.0)
    last = tl.sum(tl.where(p == count - 1, total, 0.0), 0)
    to_end = tl.where(p_ok, tl.exp(tl.where(p_ok, last - total, 0.0)), 0.0)
    k_to_end = tl.trans(k * to_end[:, None])
    state = tl.dot(k_to_end, u, state * tl.exp(last), input_precision=PRECISION)
    tl.store(at_state, state, mask=i_ok[:, None] & j_ok)
