"""The gated delta rule, token by token in float64: the truth of luceasync.models.gated_delta."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Shapes as in delta_chunks; float64 output [batch, rows, heads, value_dim] and state."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    batch, num_rows, heads = g.shape
    out, state = torch.zeros_like(v), state.clone()
    for b in range(batch):
        for h in range(heads):
            s = state[b, h]  # [key_dim, value_dim], a view
            for t in range(num_rows):
                s.mul_(g[b, t, h].exp())
                u = beta[b, t, h] * (v[b, t, h] - s.T @ k[b, t, h])
                s.add_(torch.outer(k[b, t, h], u))
                out[b, t, h] = s.T @ q[b, t, h]
    return out, state
