"""What DFlash2 adds to a drafter: convolutions over the rows of a block, and a selector that
chooses the tokens of a proposal one after the other.

Tensors of fixed shapes, no look at a value: both can be part of a captured pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from luceasync.models.weights import EmbeddingTable, InputNorm, Weight
from luceasync.pipeline.transfer import Transfer, direct
from luceasync.ranking.proposals import DraftCandidates, Proposal, ranked_tree

if TYPE_CHECKING:
    from luceasync.models.weights import SwiGLU
    from luceasync.speculation.dflash.draft_spec import SelectorSpec

# The head's best tokens for hidden rows [entries, slots, hidden], so many.
HeadCandidates = Callable[[Tensor, int], DraftCandidates]


@dataclass(frozen=True, slots=True)
class BlockConvolution:
    """Convolutions around one half of a layer: of its normed input, and of its output.

    `base` [2, taps, hidden]: kernels of the input, then of the output, by distance; `dynamic` makes
    what a row adds to them: [2 * taps * groups, hidden], sides, taps and groups in this order.
    """

    base: Tensor
    dynamic: Weight

    @property
    def num_bytes(self) -> int:
        return self.base.nbytes + self.dynamic.num_bytes

    def around(self, x: Tensor, norm: InputNorm, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """x + convolved(inner(convolved(norm(x)))): [entries, rows, hidden]. Both kernels of a row
        are made of its normed input.
        """
        normed = norm(x)
        num_sides, num_taps, _ = self.base.shape
        dynamic = self.dynamic.linear(normed).unflatten(-1, (num_sides, num_taps, -1))
        before, after = dynamic.unbind(2)  # [entries, rows, taps, groups] each
        return x + self._convolve(inner(self._convolve(normed, before, 0)), after, 1)

    def _convolve(self, x: Tensor, dynamic: Tensor, side: int) -> Tensor:
        """Each row with those before it in its block; before the first there is nothing."""
        grouped = x.unflatten(-1, (dynamic.shape[-1], -1))
        base = self.base[side].unflatten(-1, grouped.shape[-2:])
        out = (base[0] + dynamic[:, :, 0, :, None]) * grouped
        for distance in range(1, min(len(base), x.shape[1])):
            kernels = base[distance] + dynamic[:, distance:, distance, :, None]
            out[:, distance:] += kernels * grouped[:, :-distance]
        mixed: Tensor = out.flatten(-2)
        return mixed


@dataclass(frozen=True, slots=True)
class LayerConvolutions:
    """Those of both halves of a layer."""

    attention: BlockConvolution
    mlp: BlockConvolution

    @property
    def num_bytes(self) -> int:
        return self.attention.num_bytes + self.mlp.num_bytes

    def feed_forward(self, x: Tensor, norm: InputNorm, network: SwiGLU) -> Tensor:
        """The second half of a layer."""
        return self.mlp.around(
            x, norm, lambda rows: network.down.linear(network.gate_up.swiglu(rows))
        )


class CandidateSelector:
    """Chooses the tokens of proposals: that of a slot by its logit, and by how well it follows the
    token before it, given the slot's hidden row h: logit(b) + <A[a] * (P h), B[b]>.
    """

    def __init__(
        self,
        spec: SelectorSpec,
        predecessors: EmbeddingTable,
        successors: EmbeddingTable,
        projection: Weight,
        device: torch.device,
    ) -> None:
        """`predecessors` A and `successors` B: [vocab, rank]; `projection` P: [rank, hidden]; all
        are on `device`.
        """
        self._spec = spec
        self._predecessors = predecessors
        self._successors = successors
        self._projection = projection
        self.device = device

    @property
    def num_candidates(self) -> int:
        return self._spec.num_candidates

    @property
    def num_bytes(self) -> int:
        codes = self._predecessors.num_bytes + self._successors.num_bytes
        return codes + self._projection.num_bytes

    def chain(self, hidden: Tensor, anchors: Tensor, candidates: DraftCandidates) -> Tensor:
        """Tokens int64 [entries, slots]: the best one of each slot, given the one before it.

        hidden: [entries, slots, hidden], after the final norm; anchors: int64 [entries].
        """
        scores = self._scores(hidden, candidates)
        before, chosen = anchors, []
        for slot in range(candidates.ids.shape[1]):
            best = scores(slot, before[:, None])[:, 0].argmax(-1, keepdim=True)
            before = candidates.ids[:, slot].gather(1, best)[:, 0]
            chosen.append(before)
        return torch.stack(chosen, 1)

    def tree(
        self, hidden: Tensor, anchors: Tensor, candidates: DraftCandidates, budget: int
    ) -> Proposal:
        """The `budget` most probable paths, where scores of a slot are logits of a softmax."""
        return ranked_tree(anchors, candidates.ids, self._scores(hidden, candidates), budget)

    def _scores(
        self, hidden: Tensor, candidates: DraftCandidates
    ) -> Callable[[int, Tensor], Tensor]:
        """Scores of a slot's candidates behind each of several tokens: (slot, int64 [entries, n])
        -> float32 [entries, n, candidates].
        """
        spec, logits = self._spec, candidates.logits * self._spec.scale
        if spec.cap is not None:
            logits = torch.tanh(logits / spec.cap) * spec.cap
        weights = self._projection.linear(hidden.to(self._projection.dtype)).float()
        followers = self._successors.lookup(candidates.ids).float() * weights[:, :, None]

        def scores(slot: int, before: Tensor) -> Tensor:
            leaders = self._predecessors.lookup(before).float()
            return logits[:, slot, None] + leaders @ followers[:, slot].transpose(1, 2)

        return scores


def selecting_head(
    selector: CandidateSelector, candidates_from: HeadCandidates, transfer: Transfer = direct
) -> Callable[[Tensor, Tensor, int | None], Proposal]:
    """What turns a drafter's hidden rows into proposals, as the target's `propose_from` does; they
    are on the selector's device.
    """

    def propose(hidden: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        found = candidates_from(hidden, selector.num_candidates)
        hidden, anchors, ids, logits = (
            transfer(each, selector.device) for each in (hidden, anchors, *found)
        )
        candidates = DraftCandidates(ids, logits)
        if budget is not None:
            return selector.tree(hidden, anchors, candidates, budget)
        chosen = selector.chain(hidden, anchors, candidates)
        return Proposal(torch.cat([anchors[:, None], chosen], 1), None)

    return propose
