"""What is done to logits before they are ranked: bias and penalties, for a batch of rows at once.

Owns no logits. Knows neither candidates nor draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from luceasync.engine.sampling.row import RowSampling, TokenCounts, has_penalties, is_edited


def apply_edits(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Bias and penalties applied to float32 `logits` `[rows, vocab]`; a copy, or `logits` when none
    has any.

    The rows of one proposal share all but a few edits. What they share is sent to the device once,
    for the first of them, and what follows in each of them replaces it there.
    """
    parts = _parts(rows)
    if not any(edits.shape[1] for _, edits in parts):
        return logits
    packed = np.concatenate([edits for _, edits in parts], axis=1)
    assert packed[1].max() < logits.shape[1], "token id outside the vocabulary"
    # Pageable memory is staged before the call returns: asynchronous, and safe.
    here = torch.from_numpy(packed).to(logits.device, non_blocking=True)
    result = logits.clone()
    begin = 0
    for num_rows, edits in parts:
        part = here[:, begin : begin + edits.shape[1]]
        begin += edits.shape[1]
        below = torch.arange(num_rows, device=logits.device)[:, None]
        where = (part[0].long() + below, part[1].long().expand(num_rows, -1))
        bias, repetition, shift = part[2:].float()  # [edits] each
        edited = logits[where] + bias
        edited = torch.where(edited > 0, edited / repetition, edited * repetition) - shift
        result.index_put_(where, edited)
    return result


def _parts(rows: Sequence[RowSampling]) -> list[tuple[int, np.ndarray]]:
    """Edits, and of how many rows each of them is, from the row that it names on. A later part
    replaces what an earlier one has done.
    """
    shared: dict[int, list[np.ndarray]] = {}  # by number of rows
    own = []
    for first, num_rows in _siblings(rows):
        if is_edited(rows[first].sampling):
            shared.setdefault(num_rows, []).append(_edits(first, rows[first]))
            following = range(first, first + num_rows)
            own += [_edits_behind(i, rows[i]) for i in following if rows[i].following]
    parts = [(num_rows, np.concatenate(found, axis=1)) for num_rows, found in shared.items()]
    return [*parts, (1, np.concatenate(own, axis=1))] if own else parts


def _siblings(rows: Sequence[RowSampling]) -> Iterator[tuple[int, int]]:
    """Runs of rows that differ in nothing but what follows: the first, and how many they are."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or not _are_siblings(rows[first], rows[i]):
            yield first, i - first
            first = i


def _are_siblings(row: RowSampling, other: RowSampling) -> bool:
    return other.counts is row.counts and other.sampling is row.sampling


def _edits(index: int, row: RowSampling) -> np.ndarray:
    """float64 `[5, edits]`: row, token id, bias, repetition penalty, what frequency and presence
    take away. Without what follows.
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


def _edits_behind(index: int, row: RowSampling) -> np.ndarray:
    """The same for the tokens that follow, as if they had been counted."""
    sampling, counts = row.sampling, row.counts
    assert counts is not None, "tokens follow only where they are counted"
    edits = [
        (
            index,
            token_id,
            sampling.logit_bias.get(token_id, 0.0),
            sampling.repetition_penalty,
            sampling.frequency_penalty * (counts.count(token_id) + num_more)
            + sampling.presence_penalty,
        )
        for token_id, num_more in Counter(row.following).items()
    ]
    return np.array(edits).T
