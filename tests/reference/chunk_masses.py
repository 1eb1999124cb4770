"""What of the newest queries' attention falls on each chunk, as loops in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_weights(query: Tensor, keys: Tensor, position: int, chunk_tokens: int) -> list[float]:
    """One head's query at `position` and all keys [tokens, head_dim]: of each chunk the log of the
    sum of e to the power of its scores, as far as the query sees them.
    """
    found = []
    for begin in range(0, len(keys), chunk_tokens):
        end = min(begin + chunk_tokens, len(keys), position + 1)
        scores = [
            float(query.double() @ keys[t].double()) / math.sqrt(len(query))
            for t in range(begin, end)
        ]
        found.append(math.log(sum(map(math.exp, scores))) if scores else -math.inf)
    return found


def masses(queries: Tensor, keys: Tensor, positions: list[int], chunk_tokens: int) -> Tensor:
    """s[c]: of each head the most that any query gives the chunk, summed over heads.

    queries: [newest, heads, head_dim] at `positions`; keys: [tokens, kv_heads, head_dim]. float64
    [chunks].
    """
    num_heads, num_kv_heads = queries.shape[1], keys.shape[1]
    total = torch.zeros(-(-len(keys) // chunk_tokens), dtype=torch.float64)
    for head in range(num_heads):
        of_head = keys[:, head * num_kv_heads // num_heads]
        shares = []
        for query, position in zip(queries[:, head], positions, strict=True):
            logs = torch.tensor(log_weights(query, of_head, position, chunk_tokens)).double()
            shares.append((logs - logs.logsumexp(0)).exp())
        total += torch.stack(shares).amax(0)
    return total
