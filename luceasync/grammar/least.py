"""How many tokens an answer has at least: until then, nothing that ends it may come.

Owns the mask of what may. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from luceasync.grammar.vocabulary import WORD_BITS


class Least(NamedTuple):
    """How many tokens come before an end may; `others`: the mask of all but the ends."""

    num_tokens: int
    others: np.ndarray

    @classmethod
    def of(cls, num_tokens: int, end_ids: Iterable[int], num_words: int) -> Least:
        """The ends are these tokens."""
        others = np.full(num_words, 0xFFFFFFFF, np.uint32)
        for token in end_ids:
            if token < num_words * WORD_BITS:
                others[token // WORD_BITS] &= ~np.uint32(1 << (token % WORD_BITS))
        return cls(num_tokens, others.view(np.int32))
