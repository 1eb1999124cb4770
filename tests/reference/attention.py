"""Attention and rotation as loops in float64: the slow truth of luceasync.models.ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last rows; shapes as in ops.attention, float64."""
    q, k, v = q.double(), k.double(), v.double()
    num_rows, num_heads, head_dim = q.shape
    span, num_kv_heads = k.shape[:2]
    out = torch.zeros_like(q)
    for row in range(num_rows):
        visible = span - num_rows + row + 1
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scores = k[:visible, kv_head] @ q[row, head] / math.sqrt(head_dim)
            out[row, head] = scores.softmax(0) @ v[:visible, kv_head]
    return out


def rotate(x: Tensor, position: int, rotary_dim: int, theta: float) -> Tensor:
    """One head's vector, float64: pairs (i, i + rotary_dim / 2) turned, the rest as it is."""
    x, half = x.double(), rotary_dim // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / rotary_dim)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, float64."""
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()
