"""Gated DeltaNet for many rows of a lane: the WY form within chunks, the recurrence between them.

Convolution and head norms; then, for all chunks in parallel, the part that does not depend on the
state; then a scan that carries the state in float32 (luceasync.models.gated_delta has the maths on
one page).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.delta_solve import CHUNK, DeltaChunks, prepare
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import (
    dot_precision,
    overlap_options,
    shared_bytes,
    start_next,
    wait_for_inputs,
)


def delta_rows(
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
    """Advance each entry by all its rows, as luceasync.kernels.delta.delta_step does by one row.

    projected: [entries, rows, channels + output_dim (z) + 2 value_heads (b, a)] contiguous. Returns
    [entries, rows, output_dim]; zeros for padding.
    """
    num_heads = delta_state.shape[1]
    precision = "tf32" if projected.dtype != torch.float32 else dot_precision(torch.float32)
    if torch.version.hip is not None:
        precision = "ieee"
    mixed = _convolve(projected, conv, conv_state, lanes, num_key_heads, delta_state.shape[2])
    chunks = prepare(
        projected, mixed, decay_rate, dt_bias, lanes, num_key_heads, delta_state, precision
    )
    out = _scan(mixed, chunks, delta_state, lanes, num_key_heads, precision)
    return gate(out, projected, norm, eps, lanes, conv.shape[0], num_heads)


def _convolve(
    projected: Tensor, conv: Tensor, conv_state: Tensor, lanes: Tensor, key_heads: int, key_dim: int
) -> Tensor:
    """Convolution, SiLU, norms of q and k heads. Returns float32 [entries, rows, channels]."""
    num_entries, num_rows, width = projected.shape
    channels, kernel = conv.shape
    mixed = torch.empty(
        num_entries, num_rows, channels, dtype=torch.float32, device=projected.device
    )
    block_rows = 32
    # A program takes as many channels as a key head has, for values too.
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(channels, key_dim), num_entries)
    _convolve_kernel[grid](
        projected,
        conv,
        conv_state,
        lanes,
        mixed,
        num_rows,
        channels,
        width,
        conv_state.stride(0),
        key_dim**-0.5,
        KERNEL=kernel,
        NUM_KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        BLOCK_DIM=triton.next_power_of_2(key_dim),
        BLOCK_ROWS=block_rows,
        num_warps=4,
    )
    return mixed


def _scan(
    mixed: Tensor,
    chunks: DeltaChunks,
    delta_state: Tensor,
    lanes: Tensor,
    num_key_heads: int,
    precision: str,
) -> Tensor:
    """Advance the states; return the outputs, float32 [entries, rows, heads, value_dim]."""
    num_entries, num_rows, channels = mixed.shape
    _, num_heads, key_dim, value_dim = delta_state.shape
    out = mixed.new_empty(num_entries, num_rows, num_heads, value_dim)
    block_value = min(32, max(16, triton.next_power_of_2(value_dim)))
    _scan_kernel[(triton.cdiv(value_dim, block_value), num_heads, num_entries)](
        mixed,
        chunks.solve,
        chunks.within,
        chunks.total,
        delta_state,
        lanes,
        out,
        num_rows,
        channels,
        NUM_KEY_HEADS=num_key_heads,
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_VALUE=block_value,
        CHUNK=CHUNK,
        PRECISION=precision,
        num_warps=4,
        num_stages=2 if shared_bytes(mixed) >= 216 * 1024 else 1,
    )
    return out


def gate(
    out: Tensor,
    projected: Tensor,
    norm: Tensor,
    eps: float,
    lanes: Tensor,
    z_offset: int,
    num_heads: int,
) -> Tensor:
    """Gated RMS norm of each head. Returns [entries, rows, output_dim] in projected's dtype."""
    num_entries, num_rows, width = projected.shape
    value_dim = out.shape[-1]
    gated = projected.new_empty(num_entries, num_rows, num_heads * value_dim)
    block_rows = 16
    grid = (triton.cdiv(num_rows, block_rows), num_heads, num_entries)
    _gate_kernel[grid](
        out,
        projected,
        norm,
        lanes,
        gated,
        eps,
        num_rows,
        width,
        z_offset,
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        BLOCK_VALUE=triton.next_power_of_2(value_dim),
        BLOCK_ROWS=block_rows,
        num_warps=4,
        **overlap_options(projected),
    )
    return gated


@kernel(do_not_specialize=["num_rows"])
def _convolve_kernel(
    projected,
    conv,
    conv_state,
    lanes,
    mixed,
    num_rows,
    channels,
    width,
    lane_stride,
    query_scale,
    KERNEL: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    head = tl.program_id(1)  # query heads, key heads, then values, KEY_DIM channels at a time
    entry = tl.program_id(2)
    lane = tl.load(lanes + entry)
    if lane < 0:
        return
    begin = tl.program_id(0) * BLOCK_ROWS
    t = begin + tl.arange(0, BLOCK_ROWS)[:, None]
    d = tl.arange(0, BLOCK_DIM)
    c = head * KEY_DIM + d
    c_ok = (d < KEY_DIM) & (c < channels)
    x = projected + entry.to(tl.int64) * num_rows * width
    state = conv_state + lane.to(tl.int64) * lane_stride
    total = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for i in tl.static_range(KERNEL):
        at = t + (i - (KERNEL - 1))  # below 0: in the state, whose newest row is -1
        new = tl.load(
            x + at * width + c[None, :],
            mask=(at >= 0) & (at < num_rows) & c_ok[None, :],
            other=0.0,
        )
        old = tl.load(
            state + (at + (KERNEL - 1)) * channels + c[None, :],
            mask=(at < 0) & c_ok[None, :],
            other=0.0,
        )
        taps = tl.load(conv + c * KERNEL + i, mask=c_ok, other=0.0)
        total += (new.to(tl.float32) + old.to(tl.float32)) * taps[None, :]
    total *= tl.sigmoid(total)
    if head < 2 * NUM_KEY_HEADS:
        total *= tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None]
    if head < NUM_KEY_HEADS:
        total *= query_scale
    place = (entry.to(tl.int64) * num_rows + t) * channels + c[None, :]
    tl.store(mixed + place, total, mask=(t < num_rows) & c_ok[None, :])
    if begin == 0:
        # The lane's next window. Only this program accesses these channels of the state.
        for i in tl.static_range(KERNEL - 1):
            row = num_rows + i - (KERNEL - 1)
            newest = tl.load(x + row * width + c, mask=(row >= 0) & c_ok, other=0.0)
            kept = tl.load(
                state + (row + (KERNEL - 1)) * channels + c, mask=(row < 0) & c_ok, other=0.0
            )
            tl.debug_barrier()  # every thread has read what the next store overwrites
            tl.store(state + i * channels + c, newest + kept, mask=c_ok)


@kernel(do_not_specialize=["num_rows"])
def _scan_kernel(
    mixed,
    solve,
    within,
    totals,
    delta_state,
    lanes,
    out,
    num_rows,
    channels,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1)
    entry = tl.program_id(2)
    lane = tl.load(lanes + entry)
    if lane < 0:
        return
    r = tl.arange(0, CHUNK)
    i = tl.arange(0, BLOCK_KEY)
    j = tl.program_id(0) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    i_ok = i < KEY_DIM
    j_ok = (j < VALUE_DIM)[None, :]
    at_state = (lane.to(tl.int64) * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    at_state = delta_state + at_state + i[:, None] * VALUE_DIM + j[None, :]
    state = tl.load(at_state, mask=i_ok[:, None] & j_ok, other=0.0)  # [key_dim, block_value]

    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    num_chunks = (num_rows + CHUNK - 1) // CHUNK
    for chunk in range(num_chunks):
        t = chunk * CHUNK + r
        t_ok = (t < num_rows)[:, None]
        row = entry.to(tl.int64) * num_rows + t
        out_row = (row * NUM_HEADS + head)[:, None]
        part = (entry * num_chunks + chunk) * NUM_HEADS + head
        total = tl.load(totals + part * CHUNK + r)
        last = tl.load(totals + part * CHUNK + CHUNK - 1)
        ok = t_ok & i_ok[None, :]
        at = mixed + row[:, None] * channels
        at_key = at + key_head * KEY_DIM + i[None, :]
        k = tl.load(at_key + NUM_KEY_HEADS * KEY_DIM, mask=ok, other=0.0)
        at_value = at + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + j[None, :]
        v = tl.load(at_value, mask=t_ok & j_ok, other=0.0)
        square = part.to(tl.int64) * CHUNK * CHUNK + r[:, None] * CHUNK + r[None, :]
        v -= tl.dot(k, state, input_precision=PRECISION) * tl.exp(total)[:, None]
        u = tl.dot(tl.load(solve + square), v, input_precision=PRECISION)

        q = tl.load(at_key, mask=ok, other=0.0)
        result = tl.dot(q, state, input_precision=PRECISION) * tl.exp(total)[:, None]
        result = tl.dot(tl.load(within + square), u, result, input_precision=PRECISION)
        tl.store(out + out_row * VALUE_DIM + j[None, :], result, mask=t_ok & j_ok)

        k_to_end = tl.trans(k * tl.exp(last - total)[:, None])
        state = tl.dot(k_to_end, u, state * tl.exp(last), input_precision=PRECISION)
    tl.store(at_state, state, mask=i_ok[:, None] & j_ok)


@kernel(do_not_specialize=["num_rows"])
def _gate_kernel(
    values,
    projected,
    norm,
    lanes,
    gated,
    eps,
    num_rows,
    width,
    z_offset,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1)
    entry = tl.program_id(2)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    t = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    j = tl.arange(0, BLOCK_VALUE)[None, :]
    j_ok = j < VALUE_DIM
    row = entry.to(tl.int64) * num_rows + t
    place = (row * NUM_HEADS + head) * VALUE_DIM + j
    # Padding entries have no values, so their rows stay zero.
    ok = (t < num_rows) & j_ok & (tl.load(lanes + entry) >= 0)
    x = tl.load(values + place, mask=ok, other=0.0)
    x *= tl.rsqrt(tl.sum(x * x, 1) / VALUE_DIM + eps)[:, None]
    x *= tl.load(norm + j, mask=j_ok, other=0.0)
    at = projected + row * width + z_offset + head * VALUE_DIM + j
    z = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    result = (x * z * tl.sigmoid(z)).to(gated.dtype.element_ty)
    tl.store(gated + place, result, mask=(t < num_rows) & j_ok)
