"""The quality of a drafter: accuracy of each slot, and tau along the target's own answers.

Along a greedy answer, acceptance is a comparison, so the rounds are those of the real loop. Only
answers that the target reproduces to the end are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.draft.losses import right_slots
from training.draft.network import Drafter
from training.draft.store import Batch, FeatureStore
from training.draft.target import FrozenTarget


@dataclass(frozen=True, slots=True)
class Score:
    """`tau` is the number of tokens per verify pass, including the bonus token; `slots` is the
    accuracy of each drafted slot, regardless of the slots before it.
    """

    tau: float
    slots: tuple[float, ...]

    def __str__(self) -> str:
        return f"tau {self.tau:.3f} slots " + " ".join(f"{slot:.3f}" for slot in self.slots)


@torch.no_grad()
def evaluate(
    drafter: Drafter, target: FrozenTarget, store: FeatureStore, num_rows: int, num_anchors: int
) -> Score:
    """Score every text of `store`, and the last answer of each for tau."""
    right, counted = [], []
    num_tokens = num_rounds = 0
    for begins in store.begins.split(num_rows):
        matched, counts, inside = _all_anchors(drafter, target, store, begins, num_anchors)
        right.append((matched & counts).sum((0, 1)))
        counted.append(counts.sum((0, 1)))
        walked = walk(matched & counts, inside)
        num_tokens, num_rounds = num_tokens + walked[0], num_rounds + walked[1]
    slots = torch.stack(right).sum(0) / torch.stack(counted).sum(0).clamp(min=1)
    return Score(num_tokens / max(1, num_rounds), tuple(slots.tolist()))


def _all_anchors(
    drafter: Drafter, target: FrozenTarget, store: FeatureStore, begins: Tensor, num_anchors: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For every position of the rows: matched and counted, bool [rows, tokens, block - 1], and
    where the row's first text agrees with the target, bool [rows, tokens].
    """
    places = torch.arange(store.row_tokens, device=begins.device)
    index = begins[:, None] + places
    inside = store.true[index] & (store.firsts[index] == begins[:, None])
    parts = []
    for anchors in places.split(num_anchors):
        batch = store.batch(begins, anchors.expand(len(begins), -1).contiguous())
        matched = right_slots(draft(drafter, target, batch), target.head, batch.blocks)
        parts.append((matched, batch.counted))
    matched, counted = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return matched, counted & inside[..., None], inside


def walk(matched: Tensor, inside: Tensor) -> tuple[int, int]:
    """Tokens and rounds of the greedy loop along each row's last run of `inside` positions."""
    accepted = matched.long().cumprod(-1).sum(-1).tolist()
    num_tokens = num_rounds = 0
    for row, marks in zip(accepted, inside.tolist(), strict=True):
        at, end = last_run(marks)
        while at < end - 1:
            step = min(row[at] + 1, end - 1 - at)
            at, num_tokens, num_rounds = at + step, num_tokens + step, num_rounds + 1
    return num_tokens, num_rounds


def last_run(marks: Sequence[bool]) -> tuple[int, int]:
    """The last run of true marks as `[begin, end)`; (0, 0) if there is none."""
    end = next((i + 1 for i in reversed(range(len(marks))) if marks[i]), 0)
    begin = end
    while begin and marks[begin - 1]:
        begin -= 1
    return begin, end


def draft(drafter: Drafter, target: FrozenTarget, batch: Batch) -> Tensor:
    """Rows for the target's head, in its dtype: [batch, anchors, block - 1, hidden]. On GPUs,
    products are in bfloat16, and the residual stream stays in float32.
    """
    tokens = torch.full_like(batch.blocks, drafter.spec.mask_token)
    tokens[..., 0] = batch.blocks[..., 0]
    blocks = F.embedding(tokens, target.embedding).float()
    with torch.autocast(target.device.type, torch.bfloat16, enabled=blocks.is_cuda):
        return drafter(blocks, batch.features, batch.places).to(target.dtype)
