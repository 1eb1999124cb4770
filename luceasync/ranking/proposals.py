"""Builds proposals, the rows that a verify pass checks, from the head's logits of a draft's rows.

Tensors of fixed shape on the device; never waits for it. Does not know lanes, or which rows will be
accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from luceasync.models.trees import ROOT


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens to verify; row 0 is the lane's last one. `tokens` int64 [entries, rows]; `parents`
    int32 [entries, rows]: each row's parent, an earlier row, ROOT for row 0; None: every row
    follows the one before it.
    """

    tokens: Tensor
    parents: Tensor | None

    @property
    def num_columns(self) -> int:
        """The columns of `columns`: tokens, and parents if they are listed."""
        return 1 if self.parents is None else 2

    def columns(self) -> Tensor:
        """Tokens and parents side by side, int64 [entries * rows, 1 or 2], on the device."""
        parts = [self.tokens] if self.parents is None else [self.tokens, self.parents]
        return torch.stack([part.flatten().long() for part in parts], 1)

    def with_entries(self, entries: Sequence[int], others: Proposal) -> Proposal:
        """This proposal, with the entries of these numbers replaced by those of `others`, which has
        the same shape and may be on any device."""
        device = self.tokens.device
        at = torch.tensor(entries, dtype=torch.int64).to(device, non_blocking=True)

        def put(rows: Tensor, other: Tensor) -> Tensor:
            return rows.index_copy(0, at, other.to(device, rows.dtype, non_blocking=True))

        tokens = put(self.tokens, others.tokens)
        if self.parents is None or others.parents is None:
            return Proposal(tokens, None)
        return Proposal(tokens, put(self.parents, others.parents))


class DraftCandidates(NamedTuple):
    """The tokens that a head ranks highest for each row of a draft, and their logits before any
    cap: int64 and float32 [entries, slots, k]."""

    ids: Tensor
    logits: Tensor


def propose_chain(anchors: Tensor, logits: Tensor) -> Proposal:
    """A chain of the most probable token of each slot.

    anchors: int64 [entries]; logits: [entries, slots, vocab], slot 0 right after the anchor.
    """
    return Proposal(torch.cat([anchors[:, None], logits.argmax(-1)], 1), None)


class TreeProposer:
    """Trees of `budget` rows after the anchor, with the longest expected accepted path if the
    draft's slots were independent (DDTree, L. Ringel 2026).

    The published algorithm takes nodes off a heap in order of probability. Here every depth keeps
    its `budget` best paths, among which are all nodes that the heap would take, and one stable sort
    of these puts a parent before a child of equal probability: the same tree, computed without the
    host.
    """

    def __init__(self, budget: int, num_vocab: int, device: torch.device) -> None:
        self.budget = budget
        self._num_ranked = min(budget, num_vocab)
        # The i-th best path with the r-th best next token has (i + 1) (r + 1) - 1 others that are
        # at least as good: only these pairs can be among the best `budget` of their depth.
        pairs = [
            (i, r)
            for i in range(budget)
            for r in range(self._num_ranked)
            if (i + 1) * (r + 1) <= budget
        ]
        self._paths, self._ranks = torch.tensor(pairs, device=device).unbind(1)

    def __call__(self, anchors: Tensor, logits: Tensor) -> Proposal:
        """anchors: int64 [entries]; logits: [entries, slots, vocab], slot 0 right after the anchor.

        Rows are in order of falling probability. If slots and vocabulary have fewer paths than the
        budget, the last rows repeat earlier ones.
        """
        scores, ids = logits.float().log_softmax(-1).topk(self._num_ranked)
        sums, ranks, parents = self._grow(_numbers(scores))
        return _best_paths(anchors, sums, ids.gather(2, ranks), parents, self.budget)

    def _grow(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best paths of every depth: log-probability, rank of the last token in its slot, and
        the path before it, counted through all depths. Each [entries, slots, budget].

        scores: float32 [entries, slots, ranked], descending.
        """
        missing = (0, self.budget - self._num_ranked)
        best = torch.nn.functional.pad(scores[:, 0], missing, value=-torch.inf)
        rank = _count_up(best) % self._num_ranked
        sums, ranks, parents = [best], [rank], [torch.full_like(rank, ROOT)]
        for slot in range(1, scores.shape[1]):
            joined = best[:, self._paths] + scores[:, slot, self._ranks]
            best, chosen = joined.topk(self.budget)
            sums.append(best)
            ranks.append(self._ranks[chosen])
            parents.append(self._paths[chosen] + (slot - 1) * self.budget)
        return torch.stack(sums, 1), torch.stack(ranks, 1), torch.stack(parents, 1)


def ranked_tree(
    anchors: Tensor, ids: Tensor, scores: Callable[[int, Tensor], Tensor], budget: int
) -> Proposal:
    """A tree of the `budget` most probable paths, where the scores of a slot's tokens depend on the
    token before them.

    anchors: int64 [entries]; ids: int64 [entries, slots, k], the tokens of each slot;
    `scores(slot, before)`: float32 [entries, n, k] behind tokens int64 [entries, n], logits of a
    softmax. Rows as TreeProposer's.
    """
    num_ranked = ids.shape[-1]
    best, before = anchors.new_zeros((len(anchors), 1), dtype=torch.float32), anchors[:, None]
    all_sums, all_tokens, all_parents = [], [], []
    for slot in range(ids.shape[1]):
        joined = best[..., None] + _numbers(scores(slot, before).log_softmax(-1))
        joined = joined.flatten(1)
        # If there are fewer paths than the budget, these places stay unused.
        missing = max(budget - joined.shape[1], 0)
        best, chosen = torch.nn.functional.pad(joined, (0, missing), value=-torch.inf).topk(budget)
        chosen = chosen % joined.shape[1]
        before = ids[:, slot].gather(1, chosen % num_ranked)
        above = chosen // num_ranked + (slot - 1) * budget
        above = above if slot else torch.full_like(above, ROOT)
        all_sums.append(best)
        all_tokens.append(before)
        all_parents.append(above)
    sums, tokens, parents = (torch.stack(rows, 1) for rows in (all_sums, all_tokens, all_parents))
    return _best_paths(anchors, sums, tokens, parents, budget)


def _best_paths(
    anchors: Tensor, sums: Tensor, tokens: Tensor, parents: Tensor, budget: int
) -> Proposal:
    """The tree of the best `budget` of all depths' best paths, a parent before its children.

    sums, tokens, parents: [entries, slots, budget], a path's log-probability, its last token, and
    the path before it, counted through all depths.
    """
    order = sums.flatten(1).sort(descending=True, stable=True).indices
    places = torch.empty_like(order).scatter_(1, order, _count_up(order))
    order = order[:, :budget]
    above = parents.flatten(1).gather(1, order)
    rows = torch.where(above < 0, 0, places.gather(1, above.clamp(min=0)) + 1)
    root = torch.full_like(anchors, ROOT)
    return Proposal(
        torch.cat([anchors[:, None], tokens.flatten(1).gather(1, order)], 1),
        torch.cat([root[:, None], rows], 1).int(),
    )


def _numbers(logprobs: Tensor) -> Tensor:
    """Replace logits that are not numbers: such a draft proposes badly, but sorting still needs
    numbers."""
    return logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0)


class Proposer:
    """Makes proposals of every shape; caches the TreeProposer of each budget."""

    def __init__(self) -> None:
        self._trees: dict[int, TreeProposer] = {}

    def __call__(self, anchors: Tensor, logits: Tensor, budget: int | None) -> Proposal:
        """Trees of `budget` rows after the anchor, None: chains. anchors: int64 [entries]; logits:
        [entries, slots, vocab], slot 0 right after the anchor.
        """
        if budget is None:
            return propose_chain(anchors, logits)
        if budget not in self._trees:
            self._trees[budget] = TreeProposer(budget, logits.shape[-1], logits.device)
        return self._trees[budget](anchors, logits)


def _count_up(like: Tensor) -> Tensor:
    """int64 [entries, n]: 0, 1, 2 and so on in each entry of `like` [entries, n]."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape[0], -1)
