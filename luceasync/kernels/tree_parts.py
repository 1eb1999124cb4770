"""Gated DeltaNet for trees of rows: what each way to launch it does alike.

luceasync.models.gated_delta.delta_tree has the maths on one page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from luceasync.kernels.overlap import dot_precision


def product_precision(dtype: torch.dtype) -> str:
    """Of products with values that came in `dtype`: tf32 keeps more than a half has."""
    if dtype == torch.float32 or torch.version.hip is not None:
        return dot_precision(torch.float32)
    return "tf32"


@triton.jit
def convolve_path(
    projected,
    conv,
    state,
    taps,
    first,
    t,
    t_ok,
    c,
    c_ok,
    channels,
    width,
    KERNEL: tl.constexpr,
):
    """Convolution along each row's path, SiLU: float32 [rows, channels]; and the rows' own inputs.

    `first`: the entry's first row; `state`: its lane's committed inputs; t, c: rows and channels.
    """
    total = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    own = tl.zeros([t.shape[0], c.shape[0]], projected.dtype.element_ty)
    for i in tl.static_range(KERNEL):
        tap = tl.load(taps + (first + t) * KERNEL + i, mask=t_ok, other=0)
        at = (tap - (KERNEL - 1))[:, None]  # below 0: committed
        in_rows = (at >= 0) & t_ok[:, None] & c_ok[None, :]
        own = tl.load(projected + (first + at) * width + c[None, :], mask=in_rows, other=0.0)
        before = (at < 0) & t_ok[:, None] & c_ok[None, :]
        old = tl.load(state + tap[:, None] * channels + c[None, :], mask=before, other=0.0)
        weight = tl.load(conv + c * KERNEL + i, mask=c_ok, other=0.0)
        total += (own.to(tl.float32) + old.to(tl.float32)) * weight[None, :]
    return total * tl.sigmoid(total), own  # the last tap is the row itself


@triton.jit
def unit_rows(x):
    """Rows of norm 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def path_decay(seen, g, r):
    """Of the rows' log decays `g`: their sums along each row's path from the root, [rows], and what
    of an ancestor is left at a row, [rows, rows], 0 off its path.
    """
    total = tl.sum(tl.where(seen, g[None, :], 0.0), 1)
    # The same vector as columns: a row's total is that of its ancestors and itself.
    across = tl.sum(tl.where(r[:, None] == r[None, :], total[:, None], 0.0), 0)
    # Masked before the exponential: off the path the difference may be large and positive.
    return total, tl.exp(tl.where(seen, total[:, None] - across[None, :], float("-inf")))
