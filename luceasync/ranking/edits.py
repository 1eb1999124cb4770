"""Bias and penalties on the device, for a batch of rows at once. Owns no logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from luceasync.ranking.logits import Edits


def apply_edits(logits: Tensor, parts: Sequence[Edits]) -> Tensor:
    """`parts` applied to float32 `logits` `[rows, vocab]`, one after the other; a copy, or `logits`
    when they edit nothing.
    """
    if not any(part.table.shape[1] for part in parts):
        return logits
    packed = np.concatenate([part.table for part in parts], axis=1)
    assert packed[1].max() < logits.shape[1], "token id outside the vocabulary"
    # Pageable memory is staged before the call returns: asynchronous, and safe.
    here = torch.from_numpy(packed).to(logits.device, non_blocking=True)
    result = logits.clone()
    begin = 0
    for edits in parts:
        part = here[:, begin : begin + edits.table.shape[1]]
        begin += edits.table.shape[1]
        below = torch.arange(edits.num_rows, device=logits.device)[:, None]
        where = (part[0].long() + below, part[1].long().expand(edits.num_rows, -1))
        bias, repetition, shift = part[2:].float()  # [edits] each
        edited = logits[where] + bias
        edited = torch.where(edited > 0, edited / repetition, edited * repetition) - shift
        result.index_put_(where, edited)
    return result
