"""What is done to logits before they are ranked: bias and penalties, for a batch of rows at once.

Owns no logits. Knows neither candidates nor draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from luceasync.engine.rows import RowSampling, TokenCounts, has_penalties, is_edited


def apply_edits(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Bias and penalties applied to float32 `logits` `[rows, vocab]`; a copy, or `logits` when none
    has any.
    """
    found = [_edits(i, row) for i, row in enumerate(rows) if is_edited(row.sampling)]
    edits = np.concatenate(found, axis=1) if found else np.zeros((5, 0))
    if not edits.shape[1]:
        return logits
    assert edits[1].max() < logits.shape[1], "token id outside the vocabulary"
    # Pageable memory is staged before the call returns: asynchronous, and safe.
    packed = torch.from_numpy(edits).to(logits.device, non_blocking=True)
    where = (packed[0].long(), packed[1].long())
    bias, repetition, shift = packed[2:].float()  # [edits] each
    edited = logits[where] + bias
    edited = torch.where(edited > 0, edited / repetition, edited * repetition) - shift
    return logits.index_put(where, edited)


def _edits(index: int, row: RowSampling) -> np.ndarray:
    """float64 `[5, edits]`: row, token id, bias, repetition penalty, what frequency and presence
    take away.
    """
    sampling = row.sampling
    counts = row.counts if has_penalties(sampling) else TokenCounts(())
    assert counts is not None, "penalties without TokenCounts"
    unseen = [token_id for token_id in sampling.logit_bias if counts.slot(token_id) is None]
    num_seen = len(counts.ids)
    edits = np.zeros((5, num_seen + len(unseen)))
    edits[0] = index
    edits[1, :num_seen], edits[1, num_seen:] = counts.ids, unseen
    edits[2, num_seen:] = [sampling.logit_bias[token_id] for token_id in unseen]
    for token_id, bias in sampling.logit_bias.items():
        slot = counts.slot(token_id)
        if slot is not None:
            edits[2, slot] = bias
    edits[3, :num_seen], edits[3, num_seen:] = sampling.repetition_penalty, 1.0
    edits[4, :num_seen] = sampling.frequency_penalty * counts.counts
    edits[4, :num_seen] += sampling.presence_penalty * (counts.counts > 0)
    return edits
