"""Commit the scratch of a verify pass along each entry's accepted path: one kernel for all layers
of a kind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.attention import PAGE_TOKENS
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import dot_precision

CONV_BLOCK = 512  # channels per program
BLOCK_VALUE = 32  # columns of the state per program


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
    """Copy accepted rows to the places of the lane's rows from `begins` on.

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
    """Copy accepted rows to a lane's ring of the newest rows: row r to place r % newest.

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
    """Advance both states along the accepted rows.

    scratch: as luceasync.kernels.tree_delta.delta_tree writes it, with the layers in front;
    conv_state: [layers, lanes, kernel - 1, channels]; delta_state: float32 [layers, lanes,
    value_heads, key_dim, value_dim]; the rest as in `commit_attention`.
    """
    inputs, keys, updates, totals = scratch
    num_layers, num_entries, num_rows, channels = inputs.shape
    window = conv_state.shape[2]
    num_heads, key_dim, value_dim = delta_state.shape[2:]
    of_conv = triton.cdiv(channels, CONV_BLOCK)
    of_delta = num_heads * triton.cdiv(value_dim, BLOCK_VALUE)
    _commit_delta_kernel[(of_conv + of_delta, num_entries, num_layers)](
        inputs,
        conv_state,
        keys,
        updates,
        totals,
        delta_state,
        lanes,
        rows,
        counts,
        num_rows,
        channels,
        inputs.stride(0),
        conv_state.stride(0),
        keys.stride(0),
        updates.stride(0),
        totals.stride(0),
        delta_state.stride(0),
        OF_CONV=of_conv,
        WINDOW=window,
        BLOCK_WINDOW=triton.next_power_of_2(max(window, 1)),
        BLOCK=CONV_BLOCK,
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
    row_index = tl.load(begins + entry) + step
    place = tl.load(tables + lane * table_stride + row_index // PAGE) * PAGE + row_index % PAGE
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
def _commit_delta_kernel(
    inputs,
    conv_state,
    keys,
    updates,
    totals,
    delta_state,
    lanes,
    rows,
    counts,
    num_rows,
    channels,
    input_stride,
    conv_stride,
    key_stride,
    update_stride,
    total_stride,
    delta_stride,
    OF_CONV: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    entry = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    lane = tl.load(lanes + entry)
    count = tl.load(counts + entry)
    if (lane < 0) | (count == 0):
        return
    first = entry * num_rows
    rows += first
    lane = lane.to(tl.int64)
    # The first programs advance one state, the rest the other. None reads what another writes, so
    # the small state takes no extra time.
    if program < OF_CONV:
        _move_conv(
            inputs + layer * input_stride,
            conv_state + layer * conv_stride + lane * WINDOW * channels,
            rows,
            first,
            count,
            program * BLOCK + tl.arange(0, BLOCK)[None, :],
            channels,
            WINDOW,
            BLOCK_WINDOW,
        )
    else:
        block = program - OF_CONV
        head = block % NUM_HEADS
        _move_delta(
            keys + layer * key_stride + head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM,
            updates + layer * update_stride + head * VALUE_DIM,
            totals + layer * total_stride + head,
            delta_state + layer * delta_stride + (lane * NUM_HEADS + head) * KEY_DIM * VALUE_DIM,
            rows,
            first,
            count,
            block // NUM_HEADS * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)[None, :],
            NUM_KEY_HEADS,
            NUM_HEADS,
            KEY_DIM,
            VALUE_DIM,
            BLOCK_KEY,
            BLOCK_ROWS,
            PRECISION,
        )


@triton.jit
def _move_conv(
    inputs,
    state,
    rows,
    first,
    count,
    c,
    channels,
    WINDOW: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
):
    """Keep the newest WINDOW inputs of channels `c` [1, block]: the committed ones followed by
    those of the path.
    """
    w = tl.arange(0, BLOCK_WINDOW)
    w_ok = w < WINDOW
    ok = w_ok[:, None] & (c < channels)
    at = w + count
    step = at - WINDOW
    row = tl.load(rows + step, mask=w_ok & (step >= 0), other=0)
    row = (first + row).to(tl.int64)[:, None]
    new = tl.load(inputs + row * channels + c, mask=ok & (step >= 0)[:, None], other=0.0)
    old = tl.load(state + at[:, None] * channels + c, mask=ok & (step < 0)[:, None], other=0.0)
    tl.debug_barrier()  # every thread has read what the store overwrites
    tl.store(state + w[:, None] * channels + c, tl.where((step >= 0)[:, None], new, old), mask=ok)


@triton.jit
def _move_delta(
    keys,
    updates,
    totals,
    state,
    rows,
    first,
    count,
    j,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Pointers to a head's first row and to columns `j` [1, block] of its state."""
    i = tl.arange(0, BLOCK_KEY)
    i_ok, j_ok = i < KEY_DIM, j < VALUE_DIM
    at_state = state + i[:, None] * VALUE_DIM + j
    committed = tl.load(at_state, mask=i_ok[:, None] & j_ok, other=0.0)

    p = tl.arange(0, BLOCK_ROWS)
    p_ok = p < count
    row = (first + tl.load(rows + p, mask=p_ok, other=0)).to(tl.int64)
    total = tl.load(totals + row * NUM_HEADS, mask=p_ok, other=0.0)
    row = row[:, None]
    at = keys + row * (NUM_KEY_HEADS * KEY_DIM) + i[None, :]
    k = tl.load(at, mask=p_ok[:, None] & i_ok[None, :], other=0.0)
    u = tl.load(updates + row * (NUM_HEADS * VALUE_DIM) + j, mask=p_ok[:, None] & j_ok, other=0.0)
    last = tl.sum(tl.where(p == count - 1, total, 0.0), 0)
    to_end = tl.where(p_ok, tl.exp(tl.where(p_ok, last - total, 0.0)), 0.0)
    k_to_end = tl.trans(k * to_end[:, None])
    moved = tl.dot(k_to_end, u, committed * tl.exp(last), input_precision=PRECISION)
    tl.store(at_state, moved, mask=i_ok[:, None] & j_ok)
