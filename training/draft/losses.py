"""The drafter's loss: cross-entropy by slot, and the weights of the slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DYNAMIC_FLOOR = 0.5
RIGHT_ROWS = 16384  # at a time: logits are large


class Choices:
    """The tokens among which slots are scored in training: those that answers have, and
    `num_others` others, drawn anew each time so that all of the vocabulary is pushed down. A
    fraction of the work of the whole head, which still is what proposes.
    """

    def __init__(self, head: Tensor, known: Tensor, num_others: int) -> None:
        """`head` [vocabulary, hidden]; `known` int64 [tokens], which answers have."""
        self._whole = head
        self._index = torch.zeros(len(head), dtype=torch.int64, device=head.device)
        self._index[known] = torch.arange(len(known), device=head.device)
        is_other = torch.ones(len(head), dtype=torch.bool, device=head.device)
        is_other[known] = False
        self._others = is_other.nonzero()[:, 0]
        self._num_known = len(known)
        num_drawn = min(num_others, len(self._others))
        self._head = torch.cat([head[known], head[self._others[:num_drawn]]])

    def draw(self, blocks: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The head's rows [tokens, hidden], and `blocks` with the places of their tokens among
        them; tokens that no answer has are at some place.
        """
        drawn = self._head[self._num_known :]
        if len(self._others):
            size = {"generator": generator, "device": self._head.device}
            chosen = torch.randint(len(self._others), (len(drawn),), **size)
            torch.index_select(self._whole, 0, self._others[chosen], out=drawn)
        return self._head, self._index[blocks]


def slot_losses(rows: Tensor, head: Tensor, blocks: Tensor) -> Tensor:
    """Cross-entropy float32 [batch, anchors, block - 1]; rows [batch, anchors, block - 1, hidden],
    blocks int64 [batch, anchors, block].
    """
    wanted = blocks[..., 1:]
    logits = F.linear(rows, head).float()
    losses = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none")
    return losses.view_as(wanted)


def right_slots(rows: Tensor, head: Tensor, blocks: Tensor) -> Tensor:
    """Whether the most probable token is right, bool [batch, anchors, block - 1]; shapes as in
    `slot_losses`.
    """
    wanted = blocks[..., 1:]
    parts = rows.flatten(0, 2).split(RIGHT_ROWS)
    chosen = torch.cat([F.linear(part, head).argmax(-1) for part in parts])
    return chosen.view_as(wanted) == wanted


def decaying_weights(losses: Tensor, gamma: float) -> Tensor:
    """e^(-k / gamma) for slot k = 0, 1, ...: a slot only matters if all slots before it
    are right.
    """
    slots = torch.arange(losses.shape[-1], device=losses.device)
    return torch.exp(-slots / gamma).expand_as(losses)


def dynamic_weights(losses: Tensor, counted: Tensor) -> Tensor:
    """D-PACE: the gradient of the expected accepted length. With p the probability of the right
    token and s = p / 2 + 1 / 2, the weight of slot k is the sum over m >= k of s_1 ... s_m.
    """
    probability = torch.exp(-losses.detach())
    chance = (DYNAMIC_FLOOR + (1 - DYNAMIC_FLOOR) * probability).cumprod(-1) * counted
    return chance.flip(-1).cumsum(-1).flip(-1)


def weighted_mean(losses: Tensor, weights: Tensor, counted: Tensor) -> Tensor:
    """The mean of the losses that count."""
    weights = weights * counted
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


def slot_weights(name: str, losses: Tensor, counted: Tensor, gamma: float) -> Tensor:
    """The weights named `name`, "dynamic" or "decaying"."""
    if name == "dynamic":
        return dynamic_weights(losses, counted)
    return decaying_weights(losses, gamma)
