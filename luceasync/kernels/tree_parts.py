"""Gated DeltaNet for trees of rows: the parts that all its kernels share.

luceasync.models.gated_delta.delta_tree has the maths on one page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from luceasync.kernels.overlap import dot_precision


def product_precision(dtype: torch.dtype) -> str:
    """The input precision of products of `dtype` values: tf32 holds 16-bit ones exactly."""
    if dtype == torch.float32 or torch.version.hip is not None:
        return dot_precision(torch.float32)
    return "tf32"


@triton.jit
def load_weights(conv, c, c_ok, KERNEL: tl.constexpr, BLOCK_KERNEL: tl.constexpr):
    """Load the convolution weights of channels `c`: float32 [channels, BLOCK_KERNEL]."""
    tap = tl.arange(0, BLOCK_KERNEL)[None, :]
    ok = c_ok[:, None] & (tap < KERNEL)
    return tl.load(conv + c[:, None] * KERNEL + tap, mask=ok, other=0.0)


@triton.jit
def tap_weights(weights, KERNEL: tl.constexpr, BLOCK_KERNEL: tl.constexpr):
    """Split the result of `load_weights` by tap: a tuple of [1, channels]."""
    tap = tl.arange(0, BLOCK_KERNEL)[None, :]
    found = ()
    for i in tl.static_range(KERNEL):
        weight = tl.sum(tl.where(tap == i, weights, 0.0), 1)
        # Triton does not support unpacking.
        found = found + (weight[None, :],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def path_inputs(
    projected, state, taps, first, t, t_ok, c, c_ok, channels, width, KERNEL: tl.constexpr
):
    """The inputs of a convolution along each row's path, by tap: a tuple of [rows, channels], the
    last of which are the rows' own.

    first: the entry's first row; state: its lane's committed inputs; t, c: rows and channels.
    """
    ok = t_ok[:, None] & c_ok[None, :]
    found = ()
    for i in tl.static_range(KERNEL):
        tap = tl.load(taps + (first + t) * KERNEL + i, mask=t_ok, other=0)
        at = (tap - (KERNEL - 1))[:, None]  # below 0: committed
        in_rows = projected + (first + at) * width + c[None, :]
        committed = state + tap[:, None] * channels + c[None, :]
        # Two loads, one of them masked: Triton's compiler for AMD fails on a choice of pointers.
        of_rows = tl.load(in_rows, mask=ok & (at >= 0), other=0.0)
        x = tl.where(at >= 0, of_rows, tl.load(committed, mask=ok & (at < 0), other=0.0))
        # Triton does not support unpacking.
        found = found + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def convolved(seen, weights, KERNEL: tl.constexpr):
    """Convolution of `path_inputs` with `tap_weights`, and SiLU: float32 [rows, channels]."""
    total = seen[0].to(tl.float32) * weights[0]
    for i in tl.static_range(1, KERNEL):
        total += seen[i].to(tl.float32) * weights[i]
    return total * tl.sigmoid(total)


@triton.jit
def unit_rows(x):
    """Normalise rows to length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def path_decay(seen, g, r):
    """From the rows' log decays `g`: their sums along each row's path from the root, [rows], and
    how much of an ancestor remains at a row, [rows, rows], 0 off its path.
    """
    total = tl.sum(tl.where(seen, g[None, :], 0.0), 1)
    # The same vector as columns: a row's total covers its ancestors and itself.
    across = tl.sum(tl.where(r[:, None] == r[None, :], total[:, None], 0.0), 0)
    # Mask before the exponential: off the path the difference may be large and positive.
    return total, tl.exp(tl.where(seen, total[:, None] - across[None, :], float("-inf")))
