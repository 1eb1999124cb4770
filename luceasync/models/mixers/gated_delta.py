"""The gated delta rule (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024), in float32.

Token by token, and chunk by chunk with the same result. Does not know weights, lanes or
convolutions. Per head: S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 64


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Run one token of each sequence; `state` is updated in place.

    q, k: [batch, heads, key_dim]; v: [batch, heads, value_dim]; g, beta: [batch, heads];
    state: [batch, heads, key_dim, value_dim]; all float32, q and k normalised by the caller.
    Returns the output [batch, heads, value_dim].
    """
    state.mul_(g.exp()[..., None, None])
    u = beta[..., None] * (v - (k[..., None, :] @ state).squeeze(-2))
    state.addcmul_(k[..., :, None], u[..., None, :])
    return (q[..., None, :] @ state).squeeze(-2)


def delta_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    mark: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run many tokens of each sequence: the WY form within chunks, the recurrence between them.

    q, k: [batch, rows, heads, key_dim]; v: [batch, rows, heads, value_dim]; g, beta: [batch, rows,
    heads]; state: [batch, heads, key_dim, value_dim]. Returns [batch, rows, heads, value_dim], the
    new state, and the state after the first `mark` rows, or after all. Rows that pad the last chunk
    have k = v = beta = g = 0 and do not change the state.
    """
    num_rows = q.shape[1]
    mark = num_rows if mark is None else mark
    chunk = min(CHUNK_ROWS, num_rows)
    q, k, v = (_chunked(x, chunk) for x in (q, k, v))  # [batch, heads, chunks, chunk, dim]
    g, beta = (_chunked(x[..., None], chunk)[..., 0] for x in (g, beta))
    # In float64: after strong decay, small differences of large sums would lose their digits.
    summed = g.double().cumsum(-1)
    total = summed.float()
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    # Mask before the exponential: towards the future the difference may be large and positive.
    spans = (summed[..., :, None] - summed[..., None, :]).float()
    decay = spans.masked_fill(future, -torch.inf).exp()

    # (I + L) u = beta v - beta e^G k S, with L strictly lower: u = u0 - w S.
    k_beta = k * beta[..., None]
    lower = (k_beta @ k.transpose(-1, -2) * decay).tril(-1)
    right = torch.cat([v * beta[..., None], k_beta * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u0, w = solved.split([v.shape[-1], k.shape[-1]], -1)

    within = (q @ k.transpose(-1, -2)) * decay
    q_decayed = q * total.exp()[..., None]
    k_to_end = k * (summed[..., -1:] - summed).float().exp()[..., None]
    to_end = total[..., -1].exp()[..., None, None]
    outputs, at_mark = [], None
    for c in range(q.shape[2]):
        u = u0[:, :, c] - w[:, :, c] @ state
        if c * chunk < mark < min((c + 1) * chunk, num_rows):
            rows = slice(mark - c * chunk)
            at_mark = delta_path(state, k[:, :, c, rows], u[:, :, rows], summed[:, :, c, rows])
        outputs.append(q_decayed[:, :, c] @ state + within[:, :, c] @ u)
        state = state * to_end[:, :, c] + k_to_end[:, :, c].transpose(-1, -2) @ u
        if mark == (c + 1) * chunk:
            at_mark = state
    # [batch, heads, chunks, chunk, dim] -> [batch, rows, heads, dim]
    output = torch.stack(outputs, 2).flatten(2, 3)[:, :, :num_rows]
    return output.transpose(1, 2), state, state if at_mark is None else at_mark


def delta_tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run tokens that form trees, each rooted at its sequence's state, which does not change.

    Shapes as in `delta_chunks`; ancestors: bool [batch, rows, rows], ancestor or self, rows in
    topological order. With G the sum of g along the path from the root, A the strict ancestors:
        u_t = beta_t (v_t - e^{G_t} S^T k_t - sum_{j in A} e^{G_t - G_j} (k_j . k_t) u_j)
        o_t = e^{G_t} S^T q_t + sum_{j in A or t} e^{G_t - G_j} (k_j . q_t) u_j
    This keeps key_dim + value_dim + 1 numbers per row and head instead of a state.
    Returns o [batch, rows, heads, value_dim], and u [batch, heads, rows, value_dim] and G
    [batch, heads, rows] for `delta_path`.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads, rows, dim]
    g, beta = g.transpose(1, 2), beta.transpose(1, 2)[..., None]
    on_path = ancestors[:, None]
    total = (on_path.double() @ g.double()[..., None])[..., 0]
    # Mask before the exponential: off the path the difference may be large and positive.
    spans = (total[..., :, None] - total[..., None, :]).masked_fill(~on_path, -torch.inf)
    decay, total = spans.float().exp(), total.float()
    from_root = total.exp()[..., None]
    lower = (k @ k.transpose(-1, -2) * decay * beta).tril(-1)
    right = beta * (v - from_root * (k @ state))
    u = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    out = from_root * (q @ state) + (q @ k.transpose(-1, -2) * decay) @ u
    return out.transpose(1, 2), u, total


def delta_path(state: Tensor, k: Tensor, u: Tensor, total: Tensor) -> Tensor:
    """The state after the rows of one path of `delta_tree`.

    state: [..., heads, key_dim, value_dim]; k: [..., heads, rows, key_dim]; u: [..., heads, rows,
    value_dim]; total: [..., heads, rows], the log decay since the state. Rows in path order.
    """
    to_end = (total[..., -1:] - total).float().exp()[..., None]
    kept = state * total[..., -1].float().exp()[..., None, None]
    return kept + (k * to_end).transpose(-1, -2) @ u


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """[batch, rows, heads, dim] -> [batch, heads, chunks, chunk, dim], padded with zeros."""
    missing = -x.shape[1] % chunk
    x = F.pad(x, (0, 0, 0, 0, 0, missing)).transpose(1, 2)
    chunked: Tensor = x.unflatten(2, (-1, chunk))
    return chunked.contiguous()
