"""Tokens of guided choices, looked at once they are known, all of a round's in one go: most may
come, and need no mask.

Decides which tokens stand. Knows no lanes and no proposals but those it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from luceasync.engine.generation import Generation
from luceasync.engine.sampling.choose import Behind, Ranked, is_checked
from luceasync.engine.sampling.row import RowLogprobs, RowSampling
from luceasync.grammar.guide import Guide, Parents, Tokens
from luceasync.ranking.logits import NO_TOKEN, Logits


def permitted(
    generations: Sequence[Generation], rows: Sequence[RowSampling], ranked: Ranked, logits: Logits
) -> list[tuple[int, RowLogprobs | None]]:
    """The token of each of `rows`, those of `logits`, one that may come. Waits once more for the
    device where candidates do not tell it.
    """
    chosen: dict[int, tuple[int, RowLogprobs | None]] = {}
    masked = {}
    for i, (generation, row) in enumerate(zip(generations, rows, strict=True)):
        guide = generation.guide
        if guide is None or not is_checked(row):
            chosen[i] = ranked.choose(i, row.position)
            continue
        token = _firm(guide, ranked, i, row.position)
        if token is None:
            token = _at_hand(guide, ranked, i, row.position)
        if token is None:
            masked[i] = replace(row, mask=guide.mask())
        else:
            chosen[i] = token, None
    if masked:
        behind = Behind(logits, masked)
        chosen |= {i: (behind.choose(i, row.position), None) for i, row in masked.items()}
    return [chosen[i] for i in range(len(rows))]


def _firm(guide: Guide, ranked: Ranked, index: int, position: int) -> int | None:
    """The token of row `index`, where it is the same whichever others may not come, and may come
    itself. It is asked for before any mask: a mask may leave one way to write what has to come, and
    `allows` takes every one.
    """
    token = ranked.firm(index, position)
    return token if token != NO_TOKEN and guide.allows(token) else None


def _at_hand(guide: Guide, ranked: Ranked, index: int, position: int) -> int | None:
    """That of a row whose token is not firm, where the answer stands; None where candidates do not
    tell it.
    """
    mask = guide.mask()
    if mask is None:
        return ranked.choose(index, position)[0]
    return ranked.behind(index, position, mask)


def catch_up(generations: Sequence[Generation]) -> None:
    """Let guides take up what has come, while devices work."""
    for generation in generations:
        if generation.guide is not None:
            generation.guide.catch_up()


class Checking:
    """Of one entry of a proposal, row by row on the path that stands. From the first row on whose
    candidates do not tell what may come, all rows below have masks: the device is waited for once
    more, not again and again.
    """

    def __init__(
        self,
        guide: Guide,
        row: RowSampling,
        logits: Logits,
        ranked: Ranked,
        first: int,
        tokens: Tokens,
        parents: Parents,
    ) -> None:
        """`row`: how each is chosen; `first`: the entry's first row of `logits`, and of `ranked`,
        which has no masks.
        """
        self._guide = guide
        self._row = row
        self._logits = logits
        self._ranked = ranked
        self._first = first
        self._tokens, self._parents = tokens, parents
        self._behind: Behind | None = None

    def num_at_once(self, path: Sequence[int], said: Tokens) -> int:
        """How many of the tokens that the first rows of `path` say, which are firm, need not be
        asked for row by row: all, or those up to an end, if they may come; else none.
        """
        is_missed = len(said) == len(path) and self._has_below(path[-1])
        return self._guide.foresee(said, is_missed=is_missed)

    def choose(self, row: int, position: int) -> int:
        """The row's token, where the answer stands, of those that may come; NO_TOKEN if there is
        none.
        """
        number = self._first + row
        token = _firm(self._guide, self._ranked, number, position)
        if token is None and (self._behind is None or number not in self._behind):
            token = _at_hand(self._guide, self._ranked, number, position)
        if token is None:
            token = self._masked(row).choose(number, position)
        proposed = self._proposed(row)
        if proposed and token not in proposed:
            self._guide.missed(token)
        return token

    def _masked(self, row: int) -> Behind:
        """This row and those below it, with masks."""
        if self._behind is None or self._first + row not in self._behind:
            masks = self._guide.masks(self._tokens, self._parents, row)
            rows = {
                self._first + below: replace(self._row, mask=mask) for below, mask in masks.items()
            }
            self._behind = Behind(self._logits, rows)
        return self._behind

    def _has_below(self, row: int) -> bool:
        return row + 1 < len(self._tokens) if self._parents is None else row in self._parents

    def _proposed(self, row: int) -> list[int]:
        """The tokens of the rows below."""
        if self._parents is None:
            return self._tokens[row + 1 : row + 2]
        pairs = zip(self._tokens, self._parents, strict=True)
        return [token for token, parent in pairs if parent == row]
