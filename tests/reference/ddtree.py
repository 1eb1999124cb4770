"""The draft tree as it was published, one node at a time off a heap: the slow truth of
luceasync.ranking.proposals.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import count


def best_first(
    logprobs: Sequence[Sequence[float]], budget: int
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and cumulative log-probabilities of the `budget` most probable nodes.

    `logprobs[slot][token]`. Row 0 is the anchor; it has no token, and probability 1.
    """
    ranked = [sorted(range(len(slot)), key=lambda t: -slot[t])[:budget] for slot in logprobs]
    tokens, parents, sums = [-1], [-1], [0.0]
    tie = count()
    heap = [(-logprobs[0][ranked[0][0]], next(tie), 0, 0, 0)]  # score, tie, parent, slot, rank
    while heap and len(tokens) <= budget:
        negative, _, parent, slot, rank = heapq.heappop(heap)
        row = len(tokens)
        tokens.append(ranked[slot][rank])
        parents.append(parent)
        sums.append(-negative)
        if rank + 1 < len(ranked[slot]):
            score = sums[parent] + logprobs[slot][ranked[slot][rank + 1]]
            heapq.heappush(heap, (-score, next(tie), parent, slot, rank + 1))
        if slot + 1 < len(logprobs):
            score = sums[row] + logprobs[slot + 1][ranked[slot + 1][0]]
            heapq.heappush(heap, (-score, next(tie), row, slot + 1, 0))
    return tokens, parents, sums


def expected_length(sums: Sequence[float]) -> float:
    """Expected number of accepted rows, if slots were independent."""
    return sum(math.exp(s) for s in sums[1:])
