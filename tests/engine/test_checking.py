"""A guided greedy token stands where it may come, and is else the best one that may."""

from __future__ import annotations

import numpy as np
import torch

from luceasync.dflash.accept import walk
from luceasync.engine.checking import Checking
from luceasync.ranking.local import LocalLogits

VOCAB = 32
END = 30


class OnlyEven:
    """A guide after which even tokens may come; counts what it is asked."""

    def __init__(self) -> None:
        self.num_masked: list[int] = []
        self.missing: list[int] = []

    def allows(self, token: int) -> bool:
        return token >= 0 and token % 2 == 0

    def masks(self, tokens, parents, first):
        self.num_masked.append(first)
        return {row: np.array([0x55555555], np.int32) for row in range(first, len(tokens))}

    def foresee(self, tokens, *, is_missed: bool) -> int:
        self.foreseen, self.is_missed = tokens, is_missed
        upto = tokens.index(END) + 1 if END in tokens else len(tokens)
        return upto if all(map(self.allows, tokens[:upto])) else 0

    def missed(self, token: int) -> None:
        self.missing.append(token)


class Asked(LocalLogits):
    """Logits that count how often they are ranked."""

    num_times = 0

    def rank(self, wanted, carry=None):
        self.num_times += 1
        return super().rank(wanted, carry)


def logits_of(best: list[int]) -> Asked:
    """Rows whose best token is that, and the one behind it is the next best."""
    rows = torch.zeros(len(best), VOCAB)
    for row, token in enumerate(best):
        rows[row, token], rows[row, token + 1] = 2.0, 1.0
    return Asked(rows)


def walked(best: list[int], tokens: list[int], first: int = 0) -> tuple[list[int], OnlyEven, Asked]:
    guide, logits = OnlyEven(), logits_of([9] * first + best)
    checking = Checking(guide, logits, first, tokens, None)  # type: ignore[arg-type]
    return [checking.permitted(row, token) for row, token in enumerate(best)], guide, logits


def test_what_may_come_needs_no_mask_and_nobody_waits():
    found, guide, logits = walked([4, 6, 8], [0, 4, 6])
    assert found == [4, 6, 8]
    assert guide.num_masked == [] and logits.num_times == 0


def test_one_that_may_not_come_gives_its_place_to_the_best_that_may():
    found, guide, logits = walked([4, 7, 9, 2], [0, 4, 8, 10], first=3)
    assert found == [4, 8, 10, 2]
    assert guide.num_masked == [1] and logits.num_times == 1  # once, for all rows below


def at_once(
    best: list[int], tokens: list[int], parents: list[int] | None = None
) -> tuple[int, OnlyEven]:
    """How much is known of a round, and the guide that was asked."""
    guide = OnlyEven()
    checking = Checking(guide, logits_of(best), 0, tokens, parents)  # type: ignore[arg-type]
    path = walk(tokens, parents, best.__getitem__)
    return checking.num_at_once(path, [best[row] for row in path]), guide


def test_a_round_of_which_all_may_come_is_known_at_once():
    assert at_once([4, 6, 8], [0, 4, 6])[0] == 3
    assert at_once([4, 6, 8], [0, 4, 12])[0] == 2
    assert at_once([4, 6, 2, 8], [0, 2, 4, 6], [-1, 0, 0, 2])[0] == 2


def test_nothing_is_said_after_an_end():
    assert at_once([4, END, 7, 8], [0, 4, END, 7])[0] == 2


def test_a_round_of_which_one_may_not_come_is_asked_row_by_row():
    num_known, guide = at_once([4, 7, 8], [0, 4, 7])
    assert num_known == 0 and guide.foreseen == [4, 7, 8]


def test_a_guide_is_told_of_a_token_that_no_row_proposed():
    assert at_once([4, 6, 8], [0, 4, 12])[1].is_missed
    assert not at_once([4, 6, 8], [0, 4, 6])[1].is_missed  # below the last row is nothing
    assert not at_once([4, 6, 8], [0, 4, 6], [-1, 0, 0])[1].is_missed
    assert at_once([4, 6, 8, 2], [0, 4, 6, 12], [-1, 0, 0, 1])[1].is_missed
    _, guide, _ = walked([5, 6, 8], [0, 4, 6])
    assert guide.missing == [6]  # the token that another one made room for


def test_no_finite_number_stays_none():
    guide, logits = OnlyEven(), Asked(torch.full((1, VOCAB), torch.nan))
    checking = Checking(guide, logits, 0, [0], None)  # type: ignore[arg-type]
    assert checking.permitted(0, -1) == -1
