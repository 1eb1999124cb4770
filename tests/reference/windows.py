"""Attention to a window as loops in float64 over all tokens of a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Each row sees itself and the `window` - 1 rows before it. q: [tokens, heads, head_dim]; k, v:
    [tokens, kv_heads, head_dim]. Returns float64 [tokens, heads, head_dim].
    """
    paths = [[*range(max(0, t + 1 - window), t + 1)] for t in range(len(q))]
    return torch.stack([attend_to(q[t], k, v, path) for t, path in enumerate(paths)])


def attend_to(q: Tensor, k: Tensor, v: Tensor, seen: Sequence[int]) -> Tensor:
    """One row's attention to the rows `seen`. q: [heads, head_dim]. Returns float64, the same."""
    q, k, v = q.double(), k[list(seen)].double(), v[list(seen)].double()
    num_heads, head_dim = q.shape
    out = torch.zeros_like(q)
    for head in range(num_heads):
        kv_head = head * k.shape[1] // num_heads
        scores = k[:, kv_head] @ q[head] / math.sqrt(head_dim)
        out[head] = scores.softmax(0) @ v[:, kv_head]
    return out
