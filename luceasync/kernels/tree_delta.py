"""Gated DeltaNet for trees of rows: rows have no state of their own, and the lane's is read once.

Each row's input to the state solves a unit lower triangular system over its ancestors
(luceasync.models.gated_delta.delta_tree has the maths on one page). Nothing of the lane is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.delta import softplus
from luceasync.kernels.delta_chunks import gate
from luceasync.kernels.delta_solve import solve_unit_lower
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import (
    dot_precision,
    overlap_options,
    shared_bytes,
    start_next,
    wait_for_inputs,
)
from luceasync.kernels.small_tree_delta import delta_small_tree, is_small
from luceasync.kernels.tree_parts import (
    convolved,
    load_weights,
    path_decay,
    path_inputs,
    product_precision,
    tap_weights,
    unit_rows,
)

CONV_ROWS = 16  # per program of the convolution


@dataclass(frozen=True, slots=True)
class TreeDeltaTile:
    """The part of a head's state that a program processes: `block_key` rows, `block_value`
    columns."""

    block_key: int
    block_value: int
    num_warps: int
    num_stages: int


def tile(block_rows: int) -> TreeDeltaTile:
    """The tile for 16, 32 or 64 rows, with which an H200 spills no registers."""
    return {
        16: TreeDeltaTile(128, 32, 4, 1),
        32: TreeDeltaTile(32, 64, 4, 3),
        64: TreeDeltaTile(32, 64, 8, 1),
    }[block_rows]


def delta_tree(
    projected: Tensor,
    conv: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv_state: Tensor,
    delta_state: Tensor,
    lanes: Tensor,
    ancestors: Tensor,
    taps: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    num_key_heads: int,
) -> Tensor:
    """Run all rows of each entry's tree, each as luceasync.kernels.delta.delta_step would.

    projected: [entries, rows, channels + output_dim (z) + 2 value_heads (b, a)] contiguous;
    ancestors: bool [entries, rows, rows]; taps: int32 [entries, rows, kernel], see
    luceasync.kernels.positions; scratch: written, [entries, rows, ...] contiguous: inputs
    [channels], and in float32 keys [key_heads, key_dim], updates [value_heads, value_dim], totals
    [value_heads]. Returns [entries, rows, output_dim]; zeros for padding.
    """
    key_dim, value_dim = delta_state.shape[2:]
    most_bytes, is_hip = shared_bytes(projected), torch.version.hip is not None
    small = is_small(projected.shape[1], key_dim, value_dim, most_bytes, is_hip=is_hip)
    run = delta_small_tree if small else delta_big_tree
    return run(
        projected,
        conv,
        decay_rate,
        dt_bias,
        norm,
        eps,
        conv_state,
        delta_state,
        lanes,
        ancestors,
        taps,
        scratch,
        num_key_heads=num_key_heads,
    )


def delta_big_tree(
    projected: Tensor,
    conv: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv_state: Tensor,
    delta_state: Tensor,
    lanes: Tensor,
    ancestors: Tensor,
    taps: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    num_key_heads: int,
) -> Tensor:
    """`delta_tree` in three launches, for trees of any size."""
    inputs, keys, updates, totals = scratch
    mixed = _convolve(projected, conv, conv_state, lanes, taps, inputs, keys)
    num_entries, num_rows, channels = mixed.shape
    _, num_heads, key_dim, value_dim = delta_state.shape
    out = mixed.new_empty(num_entries, num_rows, num_heads, value_dim)
    block_rows = max(16, triton.next_power_of_2(num_rows))
    chosen = tile(block_rows)
    grid = (triton.cdiv(value_dim, chosen.block_value), num_heads, num_entries)
    _delta_tree_kernel[grid](
        projected,
        mixed,
        decay_rate,
        dt_bias,
        delta_state,
        lanes,
        ancestors.view(torch.uint8),
        updates,
        totals,
        out,
        num_rows,
        channels,
        projected.shape[2],
        NUM_KEY_HEADS=num_key_heads,
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=min(chosen.block_key, max(16, triton.next_power_of_2(key_dim))),
        BLOCK_VALUE=chosen.block_value,
        BLOCK_ROWS=block_rows,
        BLOCK=block_rows // 4,
        PRECISION=product_precision(projected.dtype),
        SOLVE_PRECISION=dot_precision(torch.float32),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **overlap_options(projected),
    )
    return gate(out, projected, norm, eps, lanes, channels, num_heads)


def _convolve(
    projected: Tensor,
    conv: Tensor,
    conv_state: Tensor,
    lanes: Tensor,
    taps: Tensor,
    inputs: Tensor,
    keys: Tensor,
) -> Tensor:
    """Convolution along each row's path, SiLU, norms of q and k heads; `inputs` and `keys` are
    written. Returns float32 [entries, rows, channels].
    """
    num_entries, num_rows, width = projected.shape
    channels, kernel = conv.shape
    num_key_heads, key_dim = keys.shape[2:]
    mixed = torch.empty(
        num_entries, num_rows, channels, dtype=torch.float32, device=projected.device
    )
    # A program takes as many channels as a key head has, for values too.
    grid = (triton.cdiv(num_rows, CONV_ROWS), triton.cdiv(channels, key_dim), num_entries)
    _convolve_tree_kernel[grid](
        projected,
        conv,
        conv_state,
        lanes,
        taps,
        mixed,
        inputs,
        keys,
        num_rows,
        channels,
        width,
        conv_state.stride(0),
        key_dim**-0.5,
        KERNEL=kernel,
        BLOCK_KERNEL=triton.next_power_of_2(kernel),
        NUM_KEY_HEADS=num_key_heads,
        KEY_DIM=key_dim,
        BLOCK_DIM=triton.next_power_of_2(key_dim),
        BLOCK_ROWS=CONV_ROWS,
        num_warps=4,
        **overlap_options(projected),
    )
    return mixed


@kernel()
def _convolve_tree_kernel(
    projected,
    conv,
    conv_state,
    lanes,
    taps,
    mixed,
    inputs,
    keys,
    num_rows,
    channels,
    width,
    lane_stride,
    query_scale,
    KERNEL: tl.constexpr,
    BLOCK_KERNEL: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1)  # query heads, key heads, then values, KEY_DIM channels at a time
    entry = tl.program_id(2)
    start_next(OVERLAP)
    d = tl.arange(0, BLOCK_DIM)
    c = head * KEY_DIM + d
    c_ok = (d < KEY_DIM) & (c < channels)
    weights = load_weights(conv, c, c_ok, KERNEL, BLOCK_KERNEL)
    weights = tap_weights(weights, KERNEL, BLOCK_KERNEL)
    wait_for_inputs(OVERLAP)
    lane = tl.load(lanes + entry)
    if lane < 0:
        return
    t = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    t_ok = t < num_rows
    first = entry.to(tl.int64) * num_rows
    row = (first + t)[:, None]
    state = conv_state + lane.to(tl.int64) * lane_stride
    seen = path_inputs(projected, state, taps, first, t, t_ok, c, c_ok, channels, width, KERNEL)
    total = convolved(seen, weights, KERNEL)
    ok = t_ok[:, None] & c_ok[None, :]
    tl.store(inputs + row * channels + c[None, :], seen[KERNEL - 1], mask=ok)
    if head < 2 * NUM_KEY_HEADS:
        total = unit_rows(total)
    if head < NUM_KEY_HEADS:
        total *= query_scale
    tl.store(mixed + row * channels + c[None, :], total, mask=ok)
    if (head >= NUM_KEY_HEADS) & (head < 2 * NUM_KEY_HEADS):
        at_key = (row * NUM_KEY_HEADS + head - NUM_KEY_HEADS) * KEY_DIM + d[None, :]
        tl.store(keys + at_key, total, mask=ok)


@kernel()
def _delta_tree_kernel(
    projected,
    mixed,
    decay_rate,
    dt_bias,
    delta_state,
    lanes,
    ancestors,
    updates,
    totals,
    out,
    num_rows,
    channels,
    width,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1)
    entry = tl.program_id(2)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    lane = tl.load(lanes + entry)
    if lane < 0:
        return
    r = tl.arange(0, BLOCK_ROWS)
    j = tl.program_id(0) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    r_ok = r < num_rows
    j_ok = (j < VALUE_DIM)[None, :]
    row = entry.to(tl.int64) * num_rows + r
    at_state = (lane.to(tl.int64) * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    at_state = delta_state + at_state + j[None, :]
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    at = mixed + row[:, None] * channels
    keys_keys = tl.zeros([BLOCK_ROWS, BLOCK_ROWS], tl.float32)
    queries_keys = tl.zeros([BLOCK_ROWS, BLOCK_ROWS], tl.float32)
    keys_state = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    queries_state = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    for begin in range(0, KEY_DIM, BLOCK_KEY):
        i = begin + tl.arange(0, BLOCK_KEY)
        i_ok = i < KEY_DIM
        state = tl.load(at_state + i[:, None] * VALUE_DIM, mask=i_ok[:, None] & j_ok, other=0.0)
        ok = r_ok[:, None] & i_ok[None, :]
        at_key = at + key_head * KEY_DIM + i[None, :]
        k = tl.load(at_key + NUM_KEY_HEADS * KEY_DIM, mask=ok, other=0.0)
        q = tl.load(at_key, mask=ok, other=0.0)
        keys_keys = tl.dot(k, tl.trans(k), keys_keys, input_precision=PRECISION)
        queries_keys = tl.dot(q, tl.trans(k), queries_keys, input_precision=PRECISION)
        keys_state = tl.dot(k, state, keys_state, input_precision=PRECISION)
        queries_state = tl.dot(q, state, queries_state, input_precision=PRECISION)
    ok = r_ok[:, None] & j_ok
    at_value = at + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + j[None, :]
    v = tl.load(at_value, mask=ok, other=0.0)
    square = row[:, None] * num_rows + r[None, :]
    seen = tl.load(ancestors + square, mask=r_ok[:, None] & r_ok[None, :], other=0) > 0
    at = projected + row * width + channels + NUM_HEADS * VALUE_DIM + head
    beta = tl.where(r_ok, tl.sigmoid(tl.load(at, mask=r_ok, other=0.0).to(tl.float32)), 0.0)
    a = tl.load(at + NUM_HEADS, mask=r_ok, other=0.0).to(tl.float32)
    g = tl.load(decay_rate + head) * softplus(a + tl.load(dt_bias + head))

    total, decay = path_decay(seen, g, r)
    lower = tl.where(r[:, None] > r[None, :], keys_keys * decay * beta[:, None], 0.0)
    from_root = tl.exp(total)[:, None]
    right = (v - keys_state * from_root) * beta[:, None]
    u = solve_unit_lower(lower, right, BLOCK_ROWS, BLOCK, SOLVE_PRECISION)
    result = tl.dot(queries_keys * decay, u, queries_state * from_root, input_precision=PRECISION)

    at_row = (row * NUM_HEADS + head)[:, None] * VALUE_DIM + j[None, :]
    tl.store(updates + at_row, u, mask=ok)
    tl.store(out + at_row, result, mask=ok)
    if tl.program_id(0) == 0:
        tl.store(totals + row * NUM_HEADS + head, total, mask=r_ok)
