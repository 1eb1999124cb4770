"""What is to be done to logits before they are ranked: bias and penalties, as data.

Pure, on the host. Knows neither logits nor candidates; see luceasync.ranking for who applies it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from luceasync.engine.sampling.row import RowSampling, TokenCounts, has_penalties, is_edited
from luceasync.ranking.logits import Edits


def edits_of(rows: Sequence[RowSampling]) -> tuple[Edits, ...]:
    """Bias and penalties of the rows, which are told what stands above them.

    The rows of one proposal share all but a few edits. What they share is told once, for the first
    of them, and what follows in each of them replaces it there.
    """
    shared: dict[int, list[np.ndarray]] = {}  # by number of rows
    own = []
    for first, num_rows in _siblings(rows):
        if is_edited(rows[first].sampling):
            shared.setdefault(num_rows, []).append(_edits(first, rows[first]))
            following = range(first, first + num_rows)
            own += [_edits_behind(i, rows[i]) for i in following if rows[i].following]
    parts = [Edits(num_rows, np.concatenate(found, 1)) for num_rows, found in shared.items()]
    if own:
        parts.append(Edits(1, np.concatenate(own, 1)))
    return tuple(parts)


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
