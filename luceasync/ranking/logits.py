"""What is wanted of rows of logits, and what is found there: plain data, on the host.

Whoever holds the logits, in whatever process, answers as Logits does; nobody asks who that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Edits:
    """What is done to single logits before they are ranked: float64 `[5, edits]`, of each the row,
    the token id, the bias, the repetition penalty, and what frequency and presence take away. Each
    is of `num_rows` rows, from the one that it names on.
    """

    num_rows: int
    table: np.ndarray


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens rows may get, told for some rows: int64 `rows` `[masked]`, rising, and int32
    `words` `[masked, (vocab + 31) // 32]`, in which bit `t % 32` of word `t // 32` is set where
    token t may come.
    """

    rows: np.ndarray
    words: np.ndarray


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What is wanted of rows of logits.

    `edits`: a later one replaces what an earlier one has done to the same logit. `masks`, None:
    every token may come; after the edits, what may not come is nothing. `num_ranked`: how
    many of the highest logits, 0 where no more is wanted than which is the highest. `mass_at`: of
    each row the temperature at which its whole mass is wanted, 0 where it is not; empty where it is
    of none. `num_top`: how many of the highest log-probabilities, None where none are wanted.
    `is_of_masked`: only rows that have a mask are looked at, and what is found is theirs, in order;
    there are no edits then.
    """

    edits: tuple[Edits, ...] = ()
    num_ranked: int = 0
    mass_at: tuple[float, ...] = ()
    num_top: int | None = None
    masks: Masks | None = None
    is_of_masked: bool = False


BEST = RankRequest()  # of each row, and nothing else


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities by the logits as they came, float64: `known` `[rows, 1 + ranked]`
    of the best token and the ranked ones, and the highest, `top_values` and `top_ids` `[rows,
    top]`.
    """

    known: np.ndarray
    top_values: np.ndarray
    top_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The highest logits of each row, edited, and their ids: float64 `[rows, ranked]`, descending,
    equal ones in any order. `masses` `[rows]`: the sum of exp((logit - highest) / temperature) over
    the vocabulary, 0 where it was not wanted.
    """

    values: np.ndarray
    ids: np.ndarray
    masses: np.ndarray
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """`carried` int64 `[rows, n]`: what came to the host beside them. `best`: int64 `[rows]`, the
    lowest id of the highest logit, edited; NO_TOKEN where that is no finite number. `block` None
    where nothing is ranked.
    """

    carried: np.ndarray
    best: np.ndarray
    block: TopLogits | None


@dataclass(frozen=True, slots=True)
class WholeRow:
    """All tokens of a row by value, then by lowest id: float64 `[vocab]` each."""

    values: np.ndarray
    ids: np.ndarray


class Ranking(Protocol):
    """Rows that are being ranked; valid until the next pass."""

    def candidates(self) -> Candidates:
        """What was wanted; waits for the device."""
        ...

    def whole_row(self, index: int) -> WholeRow:
        """Row `index`, edited, where its candidates do not decide."""
        ...

    def whole_logprobs(self, index: int) -> WholeRow:
        """The same of its log-probabilities, where they were wanted."""
        ...

    def logprob(self, index: int, token_id: int) -> float:
        """One of them."""
        ...


class Logits(Protocol):
    """Rows of logits where the last layer is; valid until the next pass."""

    @property
    def num_vocab(self) -> int: ...

    def rank(self, wanted: RankRequest, carry: Tensor | None = None) -> Ranking:
        """Queue what is wanted; nobody waits. `carry` integers `[rows, n]`, on the device of the
        logits, come to the host in the same copy.
        """
        ...

    def whole(self) -> Tensor:
        """All of them, float [..., vocab], on whatever device: to measure and to compare."""
        ...
