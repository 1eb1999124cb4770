"""The drafter's loss: cross-entropy by slot, and the weights of the slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DYNAMIC_FLOOR = 0.5


def slot_losses(rows: Tensor, head: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy float32 and whether the most probable token is right, both [batch, anchors,
    block - 1]; rows [batch, anchors, block - 1, hidden], blocks int64 [batch, anchors, block].
    """
    wanted = blocks[..., 1:]
    logits = F.linear(rows, head).float()
    losses = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none")
    return losses.view_as(wanted), logits.argmax(-1) == wanted


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
