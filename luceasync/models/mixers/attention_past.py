"""Exact attention of a chunk of a prompt to tokens whose rows come by block by block.

A softmax over blocks is merged by the logarithm of each block's sum (Milakov & Gimelshein, 2018;
Dao, 2022): l = logaddexp(l1, l2), o = o1 e^(l1-l) + o2 e^(l2-l). Knows not where rows lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.models.pass_rows import Past

Part = tuple[
    Tensor, Tensor
]  # out float32 [rows, heads, head_dim], log-sum-exp float32 [heads, rows]


def attend_past(q: Tensor, past: Past, own: tuple[Tensor, Tensor], recent: Tensor | None) -> Tensor:
    """Attention of rows to all of `past`, and to themselves causally.

    q: [rows, heads, head_dim]; own: keys and values [rows, kv_heads, head_dim]; recent: the newest
    queries of the lane, which look at all keys that come by. Returns [rows, heads, head_dim].
    """
    merged: Part | None = None
    end = 0
    for begin, (keys, values) in past.blocks():
        if recent is not None:
            past.look(recent, keys, begin)
        part = attend_block(q, keys, values, is_causal=False)
        merged = part if merged is None else merge(merged, part)
        end = begin + len(keys)
    if recent is not None:
        past.look(recent, own[0], end)
    part = attend_block(q, *own, is_causal=True)
    out, _ = part if merged is None else merge(merged, part)
    return out.to(q.dtype)


def attend_block(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Part:
    """Attention of rows to a block, or to themselves. Shapes as in `attend_past`; k, v: [span,
    kv_heads, head_dim]. Query heads that share a kv head are rows of one product.
    """
    num_rows, group = q.shape[0], q.shape[1] // k.shape[1]
    folded = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
    mask = None
    if is_causal:
        hidden = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1)
        mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded[None],  # [1, kv_heads, group * rows, head_dim]
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=None if mask is None else mask.repeat(group, 1),
    )
    by_head = out[0].unflatten(1, (group, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)
    return by_head.float(), log_sum[0].unflatten(1, (group, num_rows)).flatten(0, 1)


def merge(one: Part, other: Part) -> Part:
    """Both parts as one softmax."""
    log_sum = torch.logaddexp(one[1], other[1])
    shares = [(part[1] - log_sum).exp().transpose(0, 1)[..., None] for part in (one, other)]
    return one[0] * shares[0] + other[0] * shares[1], log_sum
