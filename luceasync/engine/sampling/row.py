"""How the token of one row of logits is to be chosen: sampling, counts, bias and penalties.

Owns the token counts of the row's sequence. Pure, on the host; does not know logits, lanes or text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from luceasync.errors import RequestError
from luceasync.ranking.logits import Edits
from luceasync.request import Sampling

# Below it sampling is greedy: the distribution is too sharp for a draw, and float32 cannot divide
# by it.
MIN_TEMPERATURE = 1e-5


def is_greedy(sampling: Sampling) -> bool:
    """Whether the highest logit is taken and nothing is drawn."""
    return sampling.temperature < MIN_TEMPERATURE


def has_penalties(sampling: Sampling) -> bool:
    """Whether choosing depends on earlier tokens, so that a row must come with its TokenCounts."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def is_edited(sampling: Sampling) -> bool:
    """Whether logits are changed before they are ranked."""
    return bool(sampling.logit_bias) or has_penalties(sampling)


def check_logit_bias(sampling: Sampling, vocab_size: int) -> None:
    """Raise RequestError for a biased token id outside `[0, vocab_size)`: the device does not check
    ids."""
    for token_id in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias names token {token_id}; the tokens are 0 to {vocab_size - 1}.",
                param="logit_bias",
            )


class TokenCounts:
    """The distinct tokens of one sequence, and how often each of them was generated.

    Invariant: `ids[i]` was generated `counts[i]` times; tokens of the prompt alone have count 0.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self._slots = {token_id: slot for slot, token_id in enumerate(self._ids.tolist())}
        self._num_distinct = len(self._slots)

    @property
    def ids(self) -> np.ndarray:
        """int64 `[distinct]`, in arbitrary order."""
        return self._ids[: self._num_distinct]

    @property
    def counts(self) -> np.ndarray:
        """int64 `[distinct]`, how often each of `ids` was generated."""
        return self._counts[: self._num_distinct]

    def slot(self, token_id: int) -> int | None:
        """The index of `token_id` in `ids`; None if the sequence does not hold it."""
        return self._slots.get(token_id)

    def count(self, token_id: int) -> int:
        """How often `token_id` was generated."""
        slot = self._slots.get(token_id)
        return 0 if slot is None else int(self._counts[slot])

    def add(self, token_id: int) -> None:
        """Count one generated token. Amortised O(1)."""
        slot = self._slots.setdefault(token_id, self._num_distinct)
        if slot == len(self._ids):
            grown = max(64, 2 * slot)
            self._ids = np.concatenate([self._ids, np.zeros(grown - slot, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(grown - slot, dtype=np.int64)])
        self._num_distinct = max(self._num_distinct, slot + 1)
        self._ids[slot] = token_id
        self._counts[slot] += 1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the token of one row of logits is chosen.

    `seed` is drawn already. `position` is the index of the token in its sequence: each has its own
    draw. `counts` may be None without penalties; `following`: tokens of a proposal above the row,
    which are not counted yet. `top_logprobs` as in Request. `mask`: the allowed tokens, int32
    `[words]` as in luceasync.ranking.logits.Masks; None: all.
    """

    sampling: Sampling
    seed: int
    position: int
    counts: TokenCounts | None = None
    top_logprobs: int | None = None
    following: tuple[int, ...] = ()
    mask: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural-log probability of the chosen token, and of the most probable ones `(token id,
    logprob)`.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def edits_of(rows: Sequence[RowSampling]) -> tuple[Edits, ...]:
    """Bias and penalties of the rows as data, which luceasync.ranking applies.

    The rows of one proposal share all but a few edits. The shared ones are listed once, for the
    first row; those of the tokens that follow in each row replace them there.
    """
    shared: dict[int, list[np.ndarray]] = {}  # by number of rows
    own = []
    for first, num_rows in _siblings(rows):
        if is_edited(rows[first].sampling):
            shared.setdefault(num_rows, []).append(_edits(first, rows[first]))
            following = range(first, first + num_rows)
            own += [_edits_of_following(i, rows[i]) for i in following if rows[i].following]
    parts = [Edits(num_rows, np.concatenate(found, 1)) for num_rows, found in shared.items()]
    if own:
        parts.append(Edits(1, np.concatenate(own, 1)))
    return tuple(parts)


def _siblings(rows: Sequence[RowSampling]) -> Iterator[tuple[int, int]]:
    """Runs of rows that differ only in `following`: the first row, and how many."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or not _are_siblings(rows[first], rows[i]):
            yield first, i - first
            first = i


def _are_siblings(row: RowSampling, other: RowSampling) -> bool:
    return other.counts is row.counts and other.sampling is row.sampling


def _edits(index: int, row: RowSampling) -> np.ndarray:
    """float64 `[5, edits]`: row, token id, bias, repetition penalty, and the sum of frequency and
    presence penalties. Without the tokens that follow.
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


def _edits_of_following(index: int, row: RowSampling) -> np.ndarray:
    """The same for the tokens that follow, as if they were counted."""
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
