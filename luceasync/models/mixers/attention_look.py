"""Which chunks the newest queries of a lane look at: the log of what each chunk weighs for each.

Knows keys as tensors, and the newest queries by their places in a ring.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.recent import ring_positions


class TorchLook:
    """A LookBody as plain torch."""

    def look(
        self,
        recent: Tensor,
        rows: Tensor,
        begin: int,
        num_tokens: int,
        chunk_tokens: int,
        scores: Tensor,
    ) -> None:
        """See LookBody. recent: queries [newest, heads, head_dim]; rows: keys [tokens, kv_heads,
        head_dim]. A query sees no key behind its own.
        """
        num_recent, num_heads, head_dim = recent.shape
        group = num_heads // rows.shape[1]
        scaled = recent.float() * head_dim**-0.5
        folded = scaled.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
        products = folded @ rows.float().permute(1, 2, 0)
        products = products.view(num_heads, num_recent, -1)  # [heads, newest, tokens]
        end = begin + len(rows)
        if end > num_tokens - num_recent + 1:  # all queries see what is before
            tokens = torch.arange(begin, end, device=rows.device)
            hidden = tokens > ring_positions(num_recent, num_tokens, rows.device)[:, None]
            products.masked_fill_(hidden, -torch.inf)
        if begin % chunk_tokens or end % chunk_tokens:
            missing = begin % chunk_tokens, -end % chunk_tokens
            products = F.pad(products, missing, value=-torch.inf)
        found = _log_sums(products.unflatten(-1, (-1, chunk_tokens)))
        part = scores[..., begin // chunk_tokens : begin // chunk_tokens + found.shape[2]]
        part.copy_(torch.logaddexp(part, found))  # a chunk may come in two parts


def _log_sums(x: Tensor) -> Tensor:
    """As logsumexp over the last dimension; x is written, which takes a third of the time."""
    # Where nothing is seen -inf less a finite number stays -inf.
    best = x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
    return x.sub_(best).exp_().sum(-1).log_().add_(best[..., 0])


class TritonLook:
    """A LookBody as a kernel."""

    def look(
        self,
        recent: Tensor,
        rows: Tensor,
        begin: int,
        num_tokens: int,
        chunk_tokens: int,
        scores: Tensor,
    ) -> None:
        """See TorchLook."""
        from luceasync.kernels.chunk_scores import add_scores

        add_scores(recent, rows, begin, num_tokens, chunk_tokens, scores)
