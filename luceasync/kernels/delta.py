"""Gated DeltaNet, one new row per lane: the convolution's step, then the delta rule's.

The recurrence (Yang, Kautz, Hatamizadeh, 2024) is in float32. Both states advance in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

CONV_BLOCK = 256  # channels per program


def delta_step(
    projected: Tensor,
    conv: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv_state: Tensor,
    delta_state: Tensor,
    lanes: Tensor,
    *,
    num_key_heads: int,
) -> Tensor:
    """Advance each entry by one row.

    projected: [entries, channels + output_dim (z) + 2 value_heads (b, a)]; conv: [channels,
    kernel]; decay_rate, dt_bias: [value_heads]; norm: [value_dim]; conv_state: [lanes, kernel - 1,
    channels]; delta_state: [lanes, value_heads, key_dim, value_dim]; it and the small tensors
    float32; lanes: int32 [entries], negative = padding, which gives zeros.
    Returns [entries, output_dim]. Lanes and states are read before the wait (see
    luceasync.kernels.overlap), so a pass must not launch two steps on the same states.
    """
    num_entries = projected.shape[0]
    channels, kernel = conv.shape
    _, num_heads, key_dim, value_dim = delta_state.shape
    mixed = torch.empty(num_entries, channels, dtype=torch.float32, device=projected.device)
    out = projected.new_empty(num_entries, num_heads * value_dim)
    options = overlap_options(projected)
    _conv_kernel[(triton.cdiv(channels, CONV_BLOCK), num_entries)](
        projected,
        conv,
        conv_state,
        lanes,
        mixed,
        channels,
        projected.stride(0),
        conv_state.stride(0),
        KERNEL=kernel,
        BLOCK=CONV_BLOCK,
        num_warps=4,
        **options,
    )
    _step_kernel[(num_heads, num_entries)](
        projected,
        mixed,
        decay_rate,
        dt_bias,
        norm,
        delta_state,
        lanes,
        out,
        eps,
        key_dim**-0.5,
        projected.stride(0),
        channels,
        NUM_KEY_HEADS=num_key_heads,
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=triton.next_power_of_2(key_dim),
        BLOCK_VALUE=triton.next_power_of_2(value_dim),
        num_warps=8,
        **options,
    )
    return out


@kernel()
def _conv_kernel(
    projected,
    conv,
    conv_state,
    lanes,
    mixed,
    channels,
    projected_stride,
    lane_stride,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    entry = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = c < channels
    start_next(OVERLAP)
    # No other kernel of the pass writes the lane's inputs, so they are loaded before the wait.
    lane = tl.load(lanes + entry)
    state = conv_state + lane.to(tl.int64) * lane_stride + c
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(KERNEL - 1):
        x = tl.load(state + i * channels, mask=ok & (lane >= 0), other=0.0)
        total += x.to(tl.float32) * tl.load(conv + c * KERNEL + i, mask=ok, other=0.0)
    weight = tl.load(conv + c * KERNEL + KERNEL - 1, mask=ok, other=0.0)
    wait_for_inputs(OVERLAP)
    if lane < 0:
        return
    newest = tl.load(projected + entry.to(tl.int64) * projected_stride + c, mask=ok, other=0.0)
    for i in tl.static_range(1, KERNEL - 1):
        x = tl.load(state + i * channels, mask=ok, other=0.0)
        tl.store(state + (i - 1) * channels, x, mask=ok)
    if KERNEL > 1:
        tl.store(state + (KERNEL - 2) * channels, newest, mask=ok)
    total += newest.to(tl.float32) * weight
    tl.store(mixed + entry * channels + c, total * tl.sigmoid(total), mask=ok)


@triton.jit
def softplus(x):
    """log(1 + e^x) without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@kernel()
def _step_kernel(
    projected,
    mixed,
    decay_rate,
    dt_bias,
    norm,
    delta_state,
    lanes,
    out,
    eps,
    query_scale,
    projected_stride,
    channels,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    entry = tl.program_id(1)
    start_next(OVERLAP)
    i = tl.arange(0, BLOCK_KEY)
    j = tl.arange(0, BLOCK_VALUE)
    i_ok = i < KEY_DIM
    j_ok = j < VALUE_DIM
    scale = tl.load(norm + j, mask=j_ok, other=0.0)
    rate = tl.load(decay_rate + head)
    bias = tl.load(dt_bias + head)
    # [key_dim, value_dim]; loaded before the wait, as this takes the time; no other kernel of the
    # pass writes it.
    lane = tl.load(lanes + entry)
    at_state = (lane.to(tl.int64) * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    at_state = delta_state + at_state + i[:, None] * VALUE_DIM + j[None, :]
    ok = i_ok[:, None] & j_ok[None, :]
    state = tl.load(at_state, mask=ok & (lane >= 0), other=0.0)
    wait_for_inputs(OVERLAP)
    at_out = out + (entry * NUM_HEADS + head) * VALUE_DIM + j
    if lane < 0:
        tl.store(at_out, tl.zeros([BLOCK_VALUE], out.dtype.element_ty), mask=j_ok)
        return

    at = mixed + entry * channels
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    q = tl.load(at + key_head * KEY_DIM + i, mask=i_ok, other=0.0)
    k = tl.load(at + (NUM_KEY_HEADS + key_head) * KEY_DIM + i, mask=i_ok, other=0.0)
    v = tl.load(at + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + j, mask=j_ok, other=0.0)
    row = projected + entry.to(tl.int64) * projected_stride + channels
    z = tl.load(row + head * VALUE_DIM + j, mask=j_ok, other=0.0).to(tl.float32)
    row += NUM_HEADS * VALUE_DIM + head
    beta = tl.sigmoid(tl.load(row).to(tl.float32))
    a = tl.load(row + NUM_HEADS).to(tl.float32)
    # All loads precede the first sum, which would delay them.
    g = rate * softplus(a + bias)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * query_scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)

    state *= tl.exp(g)
    u = beta * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * u[None, :]
    tl.store(at_state, state, mask=ok)
    o = tl.sum(state * q[:, None], 0)
    o *= tl.rsqrt(tl.sum(o * o, 0) / VALUE_DIM + eps) * scale
    tl.store(at_out, (o * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=j_ok)
