"""Greedy tokens of guided choices, looked at once they are known, all of a round's in one go: most
may come, and need no mask.

Decides which tokens stand. Knows no lanes and no proposals but those it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from luceasync.engine.generation import Generation
from luceasync.engine.sampling.choose import best_behind, is_checked
from luceasync.engine.sampling.row import RowSampling
from luceasync.grammar.guide import Guide, Parents, Tokens
from luceasync.ranking.logits import Logits


def permitted(
    generations: Sequence[Generation],
    rows: Sequence[RowSampling],
    tokens: Sequence[int],
    logits: Logits,
) -> list[int]:
    """The tokens of `rows`, those of `logits`, each one that may come. Waits once more for the
    device where one may not.
    """
    masks = {}
    for i, (generation, row, token) in enumerate(zip(generations, rows, tokens, strict=True)):
        guide = generation.guide
        if guide is None or not is_checked(row) or guide.allows(token):
            continue
        if (mask := guide.mask()) is not None:
            masks[i] = mask
    best = best_behind(logits, masks)
    return [best.get(i, token) for i, token in enumerate(tokens)]


def catch_up(generations: Sequence[Generation]) -> None:
    """Let guides take up what has come, while devices work."""
    for generation in generations:
        if generation.guide is not None:
            generation.guide.catch_up()


class Checking:
    """Of one entry of a proposal, row by row on the path that stands. From the first token on that
    may not come, all rows below have masks: the device is waited for once more, not again and
    again.
    """

    def __init__(
        self, guide: Guide, logits: Logits, first: int, tokens: Tokens, parents: Parents
    ) -> None:
        """`first`: the entry's first row of `logits`."""
        self._guide = guide
        self._logits = logits
        self._first = first
        self._tokens, self._parents = tokens, parents
        self._best: dict[int, int] = {}

    def num_at_once(self, path: Sequence[int], said: Tokens) -> int:
        """How many tokens of a round need not be asked for row by row: all, or those up to an end,
        if they may come; else none. `said`: the tokens that the rows of `path` say.
        """
        return self._guide.foresee(said, is_missed=self._has_below(path[-1]))

    def permitted(self, row: int, token: int) -> int:
        """`token` of the row, where the answer stands, or the best one that may come."""
        if self._first + row not in self._best:
            if self._guide.allows(token):
                return token
            masks = self._guide.masks(self._tokens, self._parents, row)
            told = {self._first + below: mask for below, mask in masks.items()}
            self._best = best_behind(self._logits, told)
        token = self._best.get(self._first + row, token)
        proposed = self._proposed(row)
        if proposed and token not in proposed:
            self._guide.missed(token)
        return token

    def _has_below(self, row: int) -> bool:
        return row + 1 < len(self._tokens) if self._parents is None else row in self._parents

    def _proposed(self, row: int) -> list[int]:
        """The tokens of the rows below."""
        if self._parents is None:
            return self._tokens[row + 1 : row + 2]
        pairs = zip(self._tokens, self._parents, strict=True)
        return [token for token, parent in pairs if parent == row]
