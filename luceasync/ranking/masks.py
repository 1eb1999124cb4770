"""Which tokens may come, applied on the device: a bit for each, as they cross. Owns no logits."""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.ranking.logits import Masks

_WORD_BITS = 32


def apply_masks(logits: Tensor, masks: Masks) -> Tensor:
    """float32 `logits` `[rows, vocab]` with -inf for what may not come; a copy."""
    num_rows, num_vocab = logits.shape
    assert masks.words.shape[1] * _WORD_BITS >= num_vocab, "a mask of fewer tokens than logits"
    # Pageable memory is staged before the call returns: asynchronous, and safe.
    words = torch.from_numpy(masks.words).to(logits.device, non_blocking=True)
    is_refused = _refused(words)[:, :num_vocab]
    if len(masks.rows) == num_rows:
        return logits.masked_fill(is_refused, -torch.inf)
    assert masks.rows[-1] < num_rows, "a mask of a row that is not there"
    rows = torch.from_numpy(masks.rows).to(logits.device, non_blocking=True)
    masked = logits[rows].masked_fill_(is_refused, -torch.inf)
    return logits.index_copy(0, rows, masked)


def _refused(words: Tensor) -> Tensor:
    """int32 [rows, words] -> bool [rows, words * 32], lowest bit first: where none is set."""
    place = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> place) & 1 == 0).flatten(1)
