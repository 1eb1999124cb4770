"""The tokens of all rows of a batch, chosen at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luceasync.engine.sampling.choose import NUM_CANDIDATES, nothing, rank
from luceasync.engine.sampling.row import RowLogprobs, RowSampling
from luceasync.ranking.logits import Logits


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """A token id for each row, NO_TOKEN if the highest logit is not finite; log-probabilities for
    the rows that asked for them and have a token, None for the others.
    """

    token_ids: list[int]
    logprobs: list[RowLogprobs | None]


def choose(
    logits: Logits,
    rows: Sequence[RowSampling],
    *,
    num_candidates: int = NUM_CANDIDATES,
    meanwhile: Callable[[], None] = nothing,
) -> ChosenTokens:
    """Choose the next token of each row of `logits`; see `rank`."""
    ranked = rank(logits, rows, num_candidates=num_candidates, meanwhile=meanwhile)
    chosen = [ranked.choose(i, row.position) for i, row in enumerate(rows)]
    return ChosenTokens([token for token, _ in chosen], [logprobs for _, logprobs in chosen])
