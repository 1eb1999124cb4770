"""What is requested of rows of logits, and the results: plain data, on the host.

`Logits` may be held by any process; callers need not know which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from luceasync.ranking.proposals import Proposal

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of individual logits before they are ranked: float64 `[5, edits]`, for each the row,
    the token id, the bias, the repetition penalty, and the sum of frequency and presence penalties.
    Each applies to `num_rows` rows from its row on."""

    num_rows: int
    table: np.ndarray


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens are allowed in some rows: int64 `rows` `[masked]`, rising, and int32 `words`
    `[masked, (vocab + 31) // 32]`, in which bit `t % 32` of word `t // 32` is set if token t may
    come."""

    rows: np.ndarray
    words: np.ndarray


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What is requested of rows of logits.

    `edits`: a later one replaces an earlier one of the same logit. `masks` are applied after the
    edits; None: every token is allowed. `num_ranked`: how many of the highest logits; 0: only which
    is the highest. `mass_at`: by row, the temperature at which its whole mass is requested, 0 for
    none; empty: of no row. `num_top`: how many of the highest log-probabilities; None: no
    log-probabilities. `is_of_masked`: only rows that have a mask are ranked, in order; there are no
    edits then.
    """

    edits: tuple[Edits, ...] = ()
    num_ranked: int = 0
    mass_at: tuple[float, ...] = ()
    num_top: int | None = None
    masks: Masks | None = None
    is_of_masked: bool = False


BEST = RankRequest()  # only which logit of each row is the highest


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities of the unedited logits, float64: `known` `[rows, 1 + ranked]` of
    the best token and the ranked ones; the highest, `top_values` and `top_ids` `[rows, top]`.
    """

    known: np.ndarray
    top_values: np.ndarray
    top_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The highest logits of each row, edited, and their ids: float64 `[rows, ranked]`, descending,
    equal ones in any order. `masses` `[rows]`: the sum of exp((logit - highest) / temperature) over
    the vocabulary, 0 if it was not requested.
    """

    values: np.ndarray
    ids: np.ndarray
    masses: np.ndarray
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """`proposal` int64 `[rows, n]`: the columns of the proposal that `Logits.rank` was given, none
    without one. `best`: int64 `[rows]`, the lowest
    id of the highest edited logit; NO_TOKEN if that is not finite. `block` None: nothing is ranked.
    """

    proposal: np.ndarray
    best: np.ndarray
    block: TopLogits | None


@dataclass(frozen=True, slots=True)
class WholeRow:
    """All tokens of a row by value, then by lowest id: float64 `[vocab]` each."""

    values: np.ndarray
    ids: np.ndarray


class Ranking(Protocol):
    """A ranking in progress; valid until the next pass."""

    def candidates(self) -> Candidates:
        """The result; waits for the device."""
        ...

    def whole_row(self, index: int) -> WholeRow:
        """All of row `index`, edited; for rows whose candidates do not decide the token."""
        ...

    def whole_logprobs(self, index: int) -> WholeRow:
        """All log-probabilities of row `index`, if they were requested."""
        ...

    def logprob(self, index: int, token_id: int) -> float:
        """The log-probability of `token_id` in row `index`."""
        ...


class Logits(Protocol):
    """Rows of logits, where the last layer is; valid until the next pass."""

    @property
    def num_vocab(self) -> int: ...

    def rank(self, request: RankRequest, proposal: Proposal | None = None) -> Ranking:
        """Queue a ranking without waiting for it. `proposal`: the one whose verify pass computed
        these logits; its tokens and parents come to the host in the same copy.
        """
        ...

    def whole(self) -> Tensor:
        """All logits, float [..., vocab], on any device. For measurements and comparisons."""
        ...
