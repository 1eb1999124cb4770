"""The highest logit of every row: as torch finds it."""

import math

import pytest
import torch

from luceasync.kernels import best_token
from luceasync.pipeline import captured_round, static_inputs
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


@pytest.mark.parametrize("num_rows", [2, 5, 16])
def test_a_chain_is_accepted_as_far_as_best_tokens_name_its_rows(num_rows: int, device) -> None:
    num_entries, num_vocab = 8, 300
    logits = torch.randn(num_entries, num_rows, num_vocab, device=device)
    best = logits.argmax(-1)
    proposed = torch.full((num_entries, num_rows), 7, device=device)
    proposed[:, 1:] = best[:, :-1]  # all of it
    proposed[1, 1] = (best[1, 0] + 1) % num_vocab
    proposed[2, -1] = (best[2, -2] + 1) % num_vocab
    logits[3, num_rows - 2] = math.nan
    logits[4] = math.nan
    lanes, begins = [0, 3, 1, 2, 5, -1, 4, 6], [7, 0, 63, 9, 4, 0, 8, 2]
    nums_left = [99, 99, 99, 99, 99, 0, 1, num_rows]
    place = torch.tensor([lanes, begins, nums_left], dtype=torch.int32, device=device)
    stops = torch.full((num_entries, 8), NO_TOKEN, device=device)
    stops[0, :2] = torch.tensor([best[0, -1], best[1, 0]])
    anchors = torch.full((num_entries,), 8, device=device)
    path = torch.full((3, num_entries), 9, dtype=torch.int32, device=device)
    found = torch.full((num_entries, 1 + num_rows), 9, device=device)
    changed = place, anchors, path, found

    def run(accept, place, anchors, path, found) -> None:
        rows = logits.flatten(0, 1)
        accept(rows, proposed, place, stops, anchors, path, found, NO_TOKEN)

    expected = [x.clone() for x in changed]
    run(captured_round.accept_best, *expected)
    run(best_token.accept_best, *changed)
    assert all(map(torch.equal, changed, expected))
    counts = [num_rows, 1, num_rows - 1, num_rows - 1, 1, 0, 1, num_rows]
    assert path.tolist() == [lanes, begins, counts] and found[:, 0].tolist() == counts
    goes_on = [False, True, True, False, False, False, False, False]
    assert place.tolist() == [
        [lane if on else -1 for lane, on in zip(lanes, goes_on, strict=True)],
        [begin + count for begin, count in zip(begins, counts, strict=True)],
        [num - count for num, count in zip(nums_left, counts, strict=True)],
    ]
    last = [row[n] if n else 8 for row, n in zip(found.tolist(), counts, strict=True)]
    assert last[3:5] == [NO_TOKEN, NO_TOKEN]
    assert anchors.tolist() == [max(token, 0) for token in last]
