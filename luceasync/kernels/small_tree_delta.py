"""Gated DeltaNet for trees of a few rows, in one launch: convolution, delta rule and gated norm.

A program processes one value head of one entry. It loads the lane's state before it waits for the
pass, and then works independently: with so few rows, a layer is bound by latency, not by bytes.
Value heads that share a key head each recompute its queries and keys. luceasync.kernels.tree_delta
computes the same in three launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.delta import softplus
from luceasync.kernels.delta_solve import solve_unit_lower
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import (
    dot_precision,
    overlap_options,
    start_next,
    wait_for_inputs,
)
from luceasync.kernels.tree_parts import (
    convolved,
    load_weights,
    path_decay,
    path_inputs,
    product_precision,
    tap_weights,
    unit_rows,
)

BLOCK_ROWS = 16  # the most rows of a small tree
NUM_WARPS = 8
MOST_STATE_NUMBERS = 128 * 128  # of a head's state: 64 per thread fit its registers
SPARE_SHARED_BYTES = 24 * 1024  # besides the state


def is_small(
    num_rows: int, key_dim: int, value_dim: int, most_shared_bytes: int, *, is_hip: bool
) -> bool:
    """Whether `delta_small_tree` takes a tree of `num_rows` with this much shared memory."""
    numbers = _block(key_dim) * _block(value_dim)
    fits = 4 * numbers + SPARE_SHARED_BYTES <= most_shared_bytes
    return not is_hip and num_rows <= BLOCK_ROWS and numbers <= MOST_STATE_NUMBERS and fits


def delta_small_tree(
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
    """As luceasync.kernels.tree_delta.delta_tree, for a tree that `is_small`."""
    num_entries, num_rows, width = projected.shape
    channels, kernel = conv.shape
    _, num_heads, key_dim, value_dim = delta_state.shape
    out = projected.new_empty(num_entries, num_rows, num_heads * value_dim)
    _small_tree_kernel[(num_heads, num_entries)](
        projected,
        conv,
        decay_rate,
        dt_bias,
        norm,
        conv_state,
        delta_state,
        lanes,
        ancestors.view(torch.uint8),
        taps,
        *scratch,
        out,
        eps,
        key_dim**-0.5,
        num_rows,
        channels,
        width,
        conv_state.stride(0),
        KERNEL=kernel,
        BLOCK_KERNEL=triton.next_power_of_2(kernel),
        NUM_KEY_HEADS=num_key_heads,
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=_block(key_dim),
        BLOCK_VALUE=_block(value_dim),
        BLOCK_ROWS=BLOCK_ROWS,
        PRECISION=product_precision(projected.dtype),
        SOLVE_PRECISION=dot_precision(torch.float32),
        num_warps=NUM_WARPS,
        num_stages=1,
        **overlap_options(projected),
    )
    return out


def _block(dim: int) -> int:
    """`n` padded to the smallest size of a product."""
    return max(16, int(triton.next_power_of_2(dim)))


@kernel()
def _small_tree_kernel(
    projected,
    conv,
    decay_rate,
    dt_bias,
    norm,
    conv_state,
    delta_state,
    lanes,
    ancestors,
    taps,
    inputs,
    keys,
    updates,
    totals,
    out,
    eps,
    query_scale,
    num_rows,
    channels,
    width,
    lane_stride,
    KERNEL: tl.constexpr,
    BLOCK_KERNEL: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    entry = tl.program_id(1)
    start_next(OVERLAP)
    HEADS_PER_KEY: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    key_head = head // HEADS_PER_KEY
    r = tl.arange(0, BLOCK_ROWS)
    i = tl.arange(0, BLOCK_KEY)
    j = tl.arange(0, BLOCK_VALUE)
    i_ok = i < KEY_DIM
    j_ok = j < VALUE_DIM
    lane = tl.load(lanes + entry)
    c_q = key_head * KEY_DIM + i
    c_k = c_q + NUM_KEY_HEADS * KEY_DIM
    c_v = 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    q_taps = load_weights(conv, c_q, i_ok, KERNEL, BLOCK_KERNEL)
    k_taps = load_weights(conv, c_k, i_ok, KERNEL, BLOCK_KERNEL)
    v_taps = load_weights(conv, c_v, j_ok, KERNEL, BLOCK_KERNEL)
    scale = tl.load(norm + j, mask=j_ok, other=0.0)
    rate = tl.load(decay_rate + head)
    bias = tl.load(dt_bias + head)
    kept = tl.maximum(lane, 0).to(tl.int64)
    at_state = (kept * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    at_state = delta_state + at_state + i[:, None] * VALUE_DIM + j[None, :]
    is_lane = (i_ok & (lane >= 0))[:, None]
    state = tl.load(at_state, mask=is_lane & j_ok[None, :], other=0.0)
    q_taps = tap_weights(q_taps, KERNEL, BLOCK_KERNEL)
    k_taps = tap_weights(k_taps, KERNEL, BLOCK_KERNEL)
    v_taps = tap_weights(v_taps, KERNEL, BLOCK_KERNEL)
    wait_for_inputs(OVERLAP)

    first = entry.to(tl.int64) * num_rows
    row = first + r
    r_ok = r < num_rows
    ok = r_ok[:, None] & j_ok[None, :]
    at_row = (row * NUM_HEADS + head)[:, None] * VALUE_DIM + j[None, :]
    if lane < 0:
        tl.store(out + at_row, tl.zeros([BLOCK_ROWS, BLOCK_VALUE], out.dtype.element_ty), mask=ok)
        return
    at_z = projected + row[:, None] * width + channels + head * VALUE_DIM + j[None, :]
    z = tl.load(at_z, mask=ok, other=0.0)
    at = projected + row * width + channels + NUM_HEADS * VALUE_DIM + head
    b = tl.load(at, mask=r_ok, other=0.0).to(tl.float32)
    a = tl.load(at + NUM_HEADS, mask=r_ok, other=0.0).to(tl.float32)
    square = row[:, None] * num_rows + r[None, :]
    seen = tl.load(ancestors + square, mask=r_ok[:, None] & r_ok[None, :], other=0) > 0

    committed = conv_state + kept * lane_stride
    # All loads precede the first sum, which would delay them.
    q_seen = path_inputs(
        projected, committed, taps, first, r, r_ok, c_q, i_ok, channels, width, KERNEL
    )
    k_seen = path_inputs(
        projected, committed, taps, first, r, r_ok, c_k, i_ok, channels, width, KERNEL
    )
    v_seen = path_inputs(
        projected, committed, taps, first, r, r_ok, c_v, j_ok, channels, width, KERNEL
    )
    q = unit_rows(convolved(q_seen, q_taps, KERNEL)) * query_scale
    k = unit_rows(convolved(k_seen, k_taps, KERNEL))
    v = convolved(v_seen, v_taps, KERNEL)

    keys_keys = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    queries_keys = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    keys_state = tl.dot(k, state, input_precision=PRECISION)
    queries_state = tl.dot(q, state, input_precision=PRECISION)
    beta = tl.where(r_ok, tl.sigmoid(b), 0.0)
    total, decay = path_decay(seen, rate * softplus(a + bias), r)
    lower = tl.where(r[:, None] > r[None, :], keys_keys * decay * beta[:, None], 0.0)
    from_root = tl.exp(total)[:, None]
    right = (v - keys_state * from_root) * beta[:, None]
    u = solve_unit_lower(lower, right, BLOCK_ROWS, BLOCK_ROWS // 4, SOLVE_PRECISION)
    x = tl.dot(queries_keys * decay, u, queries_state * from_root, input_precision=PRECISION)

    x *= tl.rsqrt(tl.sum(x * x, 1) / VALUE_DIM + eps)[:, None] * scale[None, :]
    z = z.to(tl.float32)
    tl.store(out + at_row, (x * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=ok)
    # needed by a commit
    tl.store(updates + at_row, u, mask=ok)
    tl.store(totals + row * NUM_HEADS + head, total, mask=r_ok)
    tl.store(inputs + row[:, None] * channels + c_v[None, :], v_seen[KERNEL - 1], mask=ok)
    if head % HEADS_PER_KEY == 0:
        keys_ok = r_ok[:, None] & i_ok[None, :]
        tl.store(inputs + row[:, None] * channels + c_q[None, :], q_seen[KERNEL - 1], mask=keys_ok)
        tl.store(inputs + row[:, None] * channels + c_k[None, :], k_seen[KERNEL - 1], mask=keys_ok)
        at_key = (row * NUM_KEY_HEADS + key_head)[:, None] * KEY_DIM + i[None, :]
        tl.store(keys + at_key, k, mask=keys_ok)
