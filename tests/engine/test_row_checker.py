"""A guided token stands where it may come, and is else the one that its mask would have given."""

from __future__ import annotations

import numpy as np
import torch

from luceasync.engine.acceptance import RowChecker, walk
from luceasync.engine.sampling.choose import rank
from luceasync.engine.sampling.row import RowSampling
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import NO_TOKEN
from luceasync.request import Sampling
from tests.chosen import choose

VOCAB = 32
END = 30
SEED = 4
GREEDY, DRAWN = Sampling(), Sampling(temperature=1.0)
EVEN = np.array([0x55555555], np.int32)


class OnlyEven:
    """A guide after which even tokens may come; counts what it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0  # for one mask
        self.num_masked: list[int] = []  # the first rows of those that got them together
        self.missing: list[int] = []

    def allows(self, token: int) -> bool:
        return token >= 0 and token % 2 == 0

    def masks(self, tokens, parents, first):
        self.num_masked.append(first)
        return dict.fromkeys(range(first, len(tokens)), EVEN)

    def mask(self) -> np.ndarray:
        self.num_asked += 1
        return EVEN

    def foresee(self, tokens, *, is_missed: bool) -> int:
        self.foreseen, self.is_missed = tokens, is_missed
        upto = tokens.index(END) + 1 if END in tokens else len(tokens)
        return upto if all(map(self.allows, tokens[:upto])) else 0

    def missed(self, token: int) -> None:
        self.missing.append(token)


class Asked(LocalLogits):
    """Logits that count how often they are ranked."""

    num_times = 0

    def rank(self, wanted, proposal=None):
        self.num_times += 1
        return super().rank(wanted, proposal)


def logits_of(best: list[int]) -> Asked:
    """Rows whose best token is that, and the one behind it is the next best."""
    rows = torch.zeros(len(best), VOCAB)
    for row, token in enumerate(best):
        rows[row, token], rows[row, token + 1] = 2.0, 1.0
    return Asked(rows)


def checking_of(
    guide: OnlyEven,
    logits: Asked,
    tokens: list[int],
    parents: list[int] | None = None,
    first: int = 0,
    sampling: Sampling = GREEDY,
    num_candidates: int = VOCAB,
) -> RowChecker:
    row = RowSampling(sampling, SEED, 0)
    num_rows = len(logits.whole())
    ranked = rank(logits, [row] * num_rows, num_candidates=num_candidates)
    logits.num_times = 0
    return RowChecker(guide, row, logits, ranked, first, tokens, parents)  # type: ignore[arg-type]


def walked(best: list[int], tokens: list[int], first: int = 0) -> tuple[list[int], OnlyEven, Asked]:
    guide, logits = OnlyEven(), logits_of([9] * first + best)
    checking = checking_of(guide, logits, tokens, first=first)
    return [checking.choose(row, row) for row in range(len(best))], guide, logits


def test_an_allowed_token_needs_no_mask_and_no_wait():
    found, guide, logits = walked([4, 6, 8], [0, 4, 6])
    assert found == [4, 6, 8]
    assert guide.num_masked == [] and logits.num_times == 0


def test_one_that_may_not_come_gives_its_place_to_the_best_that_may():
    found, guide, logits = walked([4, 7, 9, 2], [0, 4, 8, 10], first=3)
    assert found == [4, 8, 10, 2]
    assert guide.num_masked == [1] and logits.num_times == 1  # once, for all rows below


class OneSpelling(OnlyEven):
    """A mask leaves one way to write what has to come; `allows` takes every one."""

    def masks(self, tokens, parents, first):
        return dict.fromkeys(range(first, len(tokens)), np.array([1 << 2], np.int32))


def test_what_may_come_stands_whatever_rows_above_it_needed():
    tokens, found = [0, 4, 6], []
    for best in ([4, 6, 8], [5, 6, 8]):
        checking = checking_of(OneSpelling(), logits_of(best), tokens)
        found.append([checking.choose(row, row) for row in range(3)])
    assert found == [[4, 6, 8], [2, 6, 8]]


def at_once(
    best: list[int], tokens: list[int], parents: list[int] | None = None
) -> tuple[int, OnlyEven]:
    """How much is known of a round, and the guide that was asked."""
    guide = OnlyEven()
    checking = checking_of(guide, logits_of(best), tokens, parents)
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


def test_a_guide_learns_of_a_token_that_no_row_proposed():
    assert at_once([4, 6, 8], [0, 4, 12])[1].is_missed
    assert not at_once([4, 6, 8], [0, 4, 6])[1].is_missed  # below the last row is nothing
    assert not at_once([4, 6, 8], [0, 4, 6], [-1, 0, 0])[1].is_missed
    assert at_once([4, 6, 8, 2], [0, 4, 6, 12], [-1, 0, 0, 1])[1].is_missed
    _, guide, _ = walked([5, 6, 8], [0, 4, 6])
    assert guide.missing == [6]  # the token that another one made room for


def test_no_finite_number_stays_none():
    guide, logits = OnlyEven(), Asked(torch.full((1, VOCAB), torch.nan))
    assert checking_of(guide, logits, [0]).choose(0, 1) == NO_TOKEN


# --- drawn tokens --------------------------------------------------------------------------------


def drawn(
    rows: torch.Tensor, num_candidates: int = VOCAB
) -> tuple[list[int], list[int], OnlyEven, Asked]:
    """What is drawn of each row, what is drawn of it behind its mask, and who was asked."""
    guide, logits = OnlyEven(), Asked(rows)
    checking = checking_of(
        guide, logits, [0] * len(rows), sampling=DRAWN, num_candidates=num_candidates
    )
    found = [checking.choose(row, row) for row in range(len(rows))]
    num_times = logits.num_times
    masked = [RowSampling(DRAWN, SEED, row, mask=EVEN) for row in range(len(rows))]
    truth = choose(logits, masked, num_candidates=num_candidates).token_ids
    logits.num_times = num_times
    return found, truth, guide, logits


def test_what_is_drawn_firmly_needs_no_mask():
    rows = torch.zeros(3, VOCAB)
    rows[range(3), [4, 6, 8]] = 20.0
    found, truth, guide, logits = drawn(rows)
    assert found == truth == [4, 6, 8]
    assert guide.num_asked == logits.num_times == 0


def test_a_firm_token_that_may_not_come_is_drawn_again_of_the_candidates():
    rows = torch.zeros(2, VOCAB)
    rows[range(2), [4, 7]] = 20.0
    found, truth, guide, logits = drawn(rows)
    assert found == truth and found[0] == 4 and found[1] % 2 == 0
    assert guide.num_asked == 1 and logits.num_times == 0


def test_where_candidates_do_not_decide_the_rows_below_are_masked_together():
    rows = torch.zeros(4, VOCAB)
    rows[0, 4] = 20.0
    found, truth, guide, logits = drawn(rows, num_candidates=4)
    assert found == truth and not any(token % 2 for token in found)
    assert guide.num_masked == [1] and logits.num_times == 1


def test_any_rows_draw_what_their_masks_would_have_given():
    rows = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    for num_candidates in (4, 16, VOCAB):
        found, truth, _, _ = drawn(rows, num_candidates)
        assert found == truth
