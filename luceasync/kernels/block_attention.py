"""Attention of many rows to a block of keys by torch's kernels, which also return the log-sum-exp,
and merging of blocks into one softmax (Milakov & Gimelshein, 2018; Dao, 2022).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel

FLASH_DIM = 256  # the widest heads of torch's fastest kernel
HEADS_EACH = 4  # of a merging program

Part = tuple[Tensor, Tensor]  # out [rows, heads, head_dim], log-sum-exp float32 [heads, rows]


def attend_block(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Part:
    """Attention of rows to a block, or causally to themselves.

    q: [rows, heads, head_dim]; k, v: [span, kv_heads, head_dim], as many rows as q if causal. The
    output is in q's dtype.
    """
    head_dim = q.shape[2]
    scale = head_dim**-0.5
    if missing := -head_dim % 8:  # torch requires it; zero padding changes nothing
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    if not q.is_cuda:
        out, log_sum = _by_cpu(q, k, v, is_causal, scale)
    elif q.element_size() == 2 and q.shape[2] <= FLASH_DIM:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        out, log_sum = found[0][0].transpose(0, 1), found[1][0]
    else:
        out, log_sum = _by_heads(q, k, v, is_causal, scale)
    return out[..., :head_dim], log_sum


def merge(whole: Part, part: Part, out: Tensor) -> None:
    """Merge both into one softmax: write `out` [rows, heads, head_dim] contiguous, which may be
    that of `whole`, and update the log-sum-exp of `whole`, whose output is float32 contiguous.
    """
    (total, log_sum), (other, other_log_sum) = whole, part
    num_rows, num_heads, head_dim = total.shape
    assert other.stride(2) == 1, f"heads of strides {other.stride()}"
    _merge_kernel[(num_rows, triton.cdiv(num_heads, HEADS_EACH))](
        total,
        log_sum,
        other,
        other_log_sum,
        out,
        *log_sum.stride(),
        *other.stride()[:2],
        *other_log_sum.stride(),
        num_heads,
        head_dim,
        HEADS=HEADS_EACH,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def _by_heads(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Part:
    """Handles other dtypes and wider heads. torch's kernel requires as many key heads as query
    heads: query heads that share a key head become its rows, unless the attention is causal."""
    num_rows, group = q.shape[0], q.shape[1] // k.shape[1]
    if is_causal:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        q = q.transpose(0, 1)
    else:
        q = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], None, True, 0.0, is_causal,
        scale=scale,
    )  # fmt: skip
    log_sum = log_sum[0, :, : q.shape[1]]  # the kernel pads rows
    if is_causal:
        return out[0].transpose(0, 1), log_sum
    by_head = out[0].unflatten(1, (group, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)
    return by_head, log_sum.unflatten(1, (group, num_rows)).flatten(0, 1)


def _by_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Part:
    """The same on CPUs, for interpreted kernels."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=scale
    )
    return out[0].transpose(0, 1), log_sum[0]


STRIDES = [f"{name}_stride" for name in ("log_head", "log_row", "other_row", "other_head")]
STRIDES += ["other_log_head_stride", "other_log_row_stride"]


@kernel(do_not_specialize=STRIDES)
def _merge_kernel(
    total,
    log_sum,
    other,
    other_log_sum,
    out,
    log_head_stride,
    log_row_stride,
    other_row_stride,
    other_head_stride,
    other_log_head_stride,
    other_log_row_stride,
    num_heads,
    head_dim,
    HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_DIM)[None, :]
    h_ok = h < num_heads
    ok = h_ok[:, None] & (d < head_dim)
    at = (row * num_heads + h)[:, None] * head_dim + d
    at_log = h * log_head_stride + row * log_row_stride
    at_other_log = h * other_log_head_stride + row * other_log_row_stride
    one = tl.load(log_sum + at_log, mask=h_ok, other=0.0)
    two = tl.load(other_log_sum + at_other_log, mask=h_ok, other=0.0)
    best = tl.maximum(one, two)
    both = best + tl.log(tl.exp(one - best) + tl.exp(two - best))
    x = tl.load(total + at, mask=ok, other=0.0)
    at_other = row * other_row_stride + h[:, None] * other_head_stride + d
    y = tl.load(other + at_other, mask=ok, other=0.0).to(tl.float32)
    x = x * tl.exp(one - both)[:, None] + y * tl.exp(two - both)[:, None]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=ok)
    tl.store(log_sum + at_log, both, mask=h_ok)
