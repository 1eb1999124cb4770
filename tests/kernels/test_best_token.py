"""The highest logit of every row: as torch finds it."""

import math

import pytest
import torch

from luceasync.kernels import best_token
from luceasync.pipeline import static_inputs
from luceasync.ranking import local

NO_TOKEN = -1


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs, so that few logits have several."""
    monkeypatch.setattr(best_token, "STRETCH", 64)


def both(logits: torch.Tensor, carry: torch.Tensor | None = None) -> torch.Tensor:
    """Run the kernels and check them against torch."""
    found = best_token.best_tokens(logits, carry, NO_TOKEN)
    assert torch.equal(found, local.best_tokens(logits, carry, NO_TOKEN))
    return found


@pytest.mark.parametrize("num_vocab", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_highest_is_found_in_whatever_stretch(num_rows, num_vocab, dtype, device) -> None:
    both(torch.randn(num_rows, num_vocab, device=device).to(dtype))


def test_of_equal_ones_the_lowest_id_is_taken(device) -> None:
    logits = torch.zeros(4, 300, device=device)
    for row, tokens in enumerate([(), (299,), (70, 130), (5, 63, 64)]):
        logits[row, list(tokens)] = 2.0
    assert both(logits)[:, 0].tolist() == [0, 299, 70, 5]


def test_a_row_whose_highest_logit_is_not_finite_has_no_token(device) -> None:
    logits = torch.randn(4, 200, device=device)
    logits[0, 130], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    logits[3, :199] = -math.inf
    assert both(logits)[:, 0].tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 199]


def test_rows_may_lie_apart_and_carry_what_comes_with_them(device) -> None:
    logits = torch.randn(5, 3, 130, device=device)[:, 1]
    carry = torch.arange(15, device=device).view(3, 5).T
    assert torch.equal(both(logits, carry)[:, :3], carry)


def test_what_is_fed_is_the_best_token_one_position_later_of_entries_that_have_a_lane(
    device,
) -> None:
    logits = torch.randn(4, 3, 300, device=device)[:, 1]
    logits[3, 70] = math.nan
    place = torch.tensor([[2, -1, 0, 1], [7, 0, 63, 9]], dtype=torch.int32, device=device)
    given = torch.tensor([[5], [8], [6], [7]], device=device)
    fed = given, place, torch.full((4,), 9, device=device)
    expected = [x.clone() for x in fed]
    static_inputs.feed_best(logits, *expected, NO_TOKEN)
    best_token.feed_best(logits, *fed, NO_TOKEN)
    assert all(map(torch.equal, fed, expected))
    best = logits.argmax(1).tolist()
    assert given[:, 0].tolist() == [best[0], 8, best[2], 0], "an embedding has a row of each"
    assert fed[2].tolist() == [best[0], 0, best[2], NO_TOKEN]
    assert place.tolist() == [[2, -1, 0, 1], [8, 0, 64, 10]]
