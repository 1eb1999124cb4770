"""Gated DeltaNet by chunks: the part that does not depend on the state, for all chunks at once.

The updates of a chunk solve a unit lower triangular system, whose inverse is computed here
(luceasync.models.mixers.gated_delta has the maths on one page).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.delta import softplus
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import dot_precision

CHUNK = 64
BLOCK = 16  # of the triangular inverse


@dataclass(frozen=True, slots=True)
class DeltaChunks:
    """The state-independent part of each chunk; float32 [entries, chunks, heads, ...]."""

    solve: Tensor  # [CHUNK, CHUNK]: u = solve (v - e^G k S)
    within: Tensor  # [CHUNK, CHUNK]: decayed q k^T
    total: Tensor  # [CHUNK]: G, the log decay since the chunk began


def prepare(
    projected: Tensor,
    mixed: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    lanes: Tensor,
    num_key_heads: int,
    delta_state: Tensor,
    precision: str,
) -> DeltaChunks:
    """Compute the state-independent part of every chunk of CHUNK rows.

    projected, decay_rate, dt_bias, delta_state, lanes as in luceasync.kernels.delta_chunks; mixed:
    float32 [entries, rows, channels], the output of the convolution.
    """
    num_entries, num_rows, channels = mixed.shape
    _, num_heads, key_dim, value_dim = delta_state.shape
    num_chunks = triton.cdiv(num_rows, CHUNK)
    per_chunk = (num_entries, num_chunks, num_heads, CHUNK)
    chunks = DeltaChunks(
        solve=mixed.new_empty(*per_chunk, CHUNK),
        within=mixed.new_empty(*per_chunk, CHUNK),
        total=mixed.new_empty(per_chunk),
    )
    _prepare_kernel[(num_chunks, num_heads, num_entries)](
        projected,
        mixed,
        decay_rate,
        dt_bias,
        lanes,
        chunks.solve,
        chunks.within,
        chunks.total,
        num_rows,
        channels,
        projected.shape[2],
        NUM_KEY_HEADS=num_key_heads,
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=max(16, triton.next_power_of_2(key_dim)),
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        PRECISION=precision,
        SOLVE_PRECISION=dot_precision(torch.float32),
        num_warps=4 if torch.version.hip is None else 8,  # AMD GPUs spill less with this
        num_stages=1,
    )
    return chunks


@triton.jit
def _split_unit_lower(lower, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """D^-1 and M of I + lower = D (I + M), lower strictly lower triangular [CHUNK, CHUNK] and D its
    diagonal blocks with the identity, CHUNK = 4 BLOCK: M vanishes at the fourth power, so
    (I + M)^-1 = (I - M) (I + M^2).

    D^-1 is computed by forward substitution in all blocks at once.
    """
    r = tl.arange(0, CHUNK)[:, None]
    c = tl.arange(0, CHUNK)[None, :]
    same = (r // BLOCK) == (c // BLOCK)
    diagonal = tl.where(same, lower, 0.0)
    inverse = tl.where(r == c, 1.0, 0.0)
    for i in range(1, BLOCK):
        # Row i of every block fits one vector, as blocks share no columns.
        row = tl.sum(tl.where(r % BLOCK == i, diagonal, 0.0), 0)
        solved = tl.sum(row[:, None] * inverse, 0)
        inverse -= tl.where(same & (r % BLOCK == i), solved[None, :], 0.0)
    between = tl.where(same, 0.0, lower)
    return inverse, tl.dot(inverse, between, input_precision=PRECISION)


@triton.jit
def solve_unit_lower(
    lower, right, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr
):
    """u of (I + lower) u = right [CHUNK, n]; see `_split_unit_lower`."""
    inverse, m = _split_unit_lower(lower, CHUNK, BLOCK, PRECISION)
    u = tl.dot(inverse, right, input_precision=PRECISION)
    u += tl.dot(m, tl.dot(m, u, input_precision=PRECISION), input_precision=PRECISION)
    return u - tl.dot(m, u, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(lower, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1; see `_split_unit_lower`."""
    inverse, m = _split_unit_lower(lower, CHUNK, BLOCK, PRECISION)
    m_squared = tl.dot(m, m, input_precision=PRECISION)
    r = tl.arange(0, CHUNK)[:, None]
    eye = tl.where(r == tl.arange(0, CHUNK)[None, :], 1.0, 0.0)
    series = tl.dot(eye - m, eye + m_squared, input_precision=PRECISION)
    return tl.dot(series, inverse, input_precision=PRECISION)


@kernel(do_not_specialize=["num_rows"])
def _prepare_kernel(
    projected,
    mixed,
    decay_rate,
    dt_bias,
    lanes,
    solve,
    within,
    totals,
    num_rows,
    channels,
    width,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    entry = tl.program_id(2)
    if tl.load(lanes + entry) < 0:
        return
    r = tl.arange(0, CHUNK)
    i = tl.arange(0, BLOCK_KEY)
    t = chunk * CHUNK + r
    t_ok = t < num_rows
    row = entry.to(tl.int64) * num_rows + t

    at = projected + row * width + channels + NUM_HEADS * VALUE_DIM + head
    b = tl.load(at, mask=t_ok, other=0.0).to(tl.float32)
    beta = tl.where(t_ok, tl.sigmoid(b), 0.0)
    a = tl.load(at + NUM_HEADS, mask=t_ok, other=0.0).to(tl.float32)
    g = tl.load(decay_rate + head) * softplus(a + tl.load(dt_bias + head))
    total = tl.cumsum(tl.where(t_ok, g, 0.0), 0)
    # Mask before the exponential: for future rows the difference may be large and positive.
    past = r[:, None] >= r[None, :]
    decay = tl.exp(tl.where(past, total[:, None] - total[None, :], float("-inf")))

    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    at = mixed + row[:, None] * channels + key_head * KEY_DIM + i[None, :]
    ok = t_ok[:, None] & (i[None, :] < KEY_DIM)
    k = tl.load(at + NUM_KEY_HEADS * KEY_DIM, mask=ok, other=0.0)
    q = tl.load(at, mask=ok, other=0.0)
    across = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    part = (entry * tl.num_programs(0) + chunk) * NUM_HEADS + head
    tl.store(totals + part * CHUNK + r, total)
    square = part.to(tl.int64) * CHUNK * CHUNK + r[:, None] * CHUNK + r[None, :]
    tl.store(within + square, across)

    # (I + L) u = beta (v - e^G k S), with L strictly lower.
    lower = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
    lower = tl.where(r[:, None] > r[None, :], lower, 0.0)
    inverse = unit_lower_inverse(lower, CHUNK, BLOCK, SOLVE_PRECISION)
    tl.store(solve + square, inverse * beta[None, :])
