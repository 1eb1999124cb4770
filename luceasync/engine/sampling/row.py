"""One row of logits: how its token is to be chosen, and what is told of the choice.

Owns the counts of the row's sequence. Knows no logits, and nothing of lanes, of text, or of why a
row wants a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from luceasync.errors import RequestError
from luceasync.request import Sampling

# Below it a temperature is none: sharper than any draw, and float32 cannot divide by it.
LEAST_TEMPERATURE = 1e-5


def is_greedy(sampling: Sampling) -> bool:
    """Whether the highest logit is taken and nothing is drawn."""
    return sampling.temperature < LEAST_TEMPERATURE


def has_penalties(sampling: Sampling) -> bool:
    """Whether choosing depends on earlier tokens, so that a row must bring its TokenCounts."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def is_edited(sampling: Sampling) -> bool:
    """Whether logits are changed before they are ranked."""
    return bool(sampling.logit_bias) or has_penalties(sampling)


def check_logit_bias(sampling: Sampling, vocab_size: int) -> None:
    """Raise RequestError for a biased token id outside `[0, vocab_size)`: a device cannot refuse
    it.
    """
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
        """int64 `[distinct]`, in no order that means anything."""
        return self._ids[: self._num_distinct]

    @property
    def counts(self) -> np.ndarray:
        """int64 `[distinct]`, how often each of `ids` was generated."""
        return self._counts[: self._num_distinct]

    def slot(self, token_id: int) -> int | None:
        """The index of `token_id` in `ids`; None when the sequence does not hold it."""
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

    `seed` is already drawn. `position` is the index of the wanted token in its sequence: each has
    its own draw. `counts` may be None when `has_penalties` says no; `following`: tokens of a
    proposal that stand above the row, which `counts` has not counted. `top_logprobs` as in Request.
    `mask`: the tokens that may come, int32 `[words]` as in luceasync.ranking.logits.Masks; None:
    all.
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
