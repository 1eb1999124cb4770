"""What is found beside the logits is plain data, and says what the logits say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import NO_TOKEN, Edits, Wanted

VOCAB = 50


def logits_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(0))


def test_without_more_that_is_wanted_only_the_highest_come():
    logits = logits_of(2, 3)
    logits[0, 1, 7] = math.nan
    found = LocalLogits(logits).rank(Wanted()).candidates()
    best = logits.argmax(-1).flatten().tolist()
    assert found.best.tolist() == [best[0], NO_TOKEN, *best[2:]]
    assert found.block is None and found.carried.shape == (6, 0)


def test_no_answer_is_as_wide_as_the_vocabulary():
    wanted = Wanted(num_ranked=5, mass_at=(0.0, 0.5), num_top=3)
    block = LocalLogits(logits_of(2)).rank(wanted).candidates().block
    assert block.values.shape == block.ids.shape == (2, 5) and block.masses.shape == (2,)
    assert block.logprobs.known.shape == (2, 6) and block.logprobs.top_ids.shape == (2, 3)


def test_masses_are_of_the_rows_and_temperatures_that_were_named():
    logits = logits_of(2)
    wanted = Wanted(num_ranked=1, mass_at=(0.0, 0.5))
    masses = LocalLogits(logits).rank(wanted).candidates().block.masses
    scaled = (logits[1] - logits[1].max()) / 0.5
    assert masses.tolist() == [0.0, pytest.approx(scaled.exp().sum().item())]


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_a_mass_is_the_same_to_the_last_bit_beside_any_rows_and_in_any_order(spread: float):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 40_000, generator=generator) * spread
    shuffled = logits[:, torch.randperm(40_000, generator=generator)]
    masses = masses_of(logits)
    assert masses_of(shuffled) == masses
    assert [masses_of(row[None])[0] for row in logits] == masses
    weights = (logits.double() - logits.amax(-1, keepdim=True).double()).exp()
    assert masses == pytest.approx(weights.sum(-1).tolist(), rel=1e-6)


def masses_of(logits: torch.Tensor) -> list[float]:
    wanted = Wanted(num_ranked=1, mass_at=(1.0,) * len(logits))
    return LocalLogits(logits).rank(wanted).candidates().block.masses.tolist()


def test_a_whole_row_is_ordered_by_value_and_then_by_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    ranking = LocalLogits(logits).rank(Wanted(num_ranked=1, num_top=1))
    assert ranking.whole_row(0).ids.tolist() == [1, 2, 3, 0]
    assert ranking.whole_row(0).values.tolist() == [3.0, 3.0, 2.0, 1.0]
    assert ranking.whole_logprobs(0).ids.tolist() == [1, 2, 3, 0]
    assert ranking.logprob(0, 3) == logits.log_softmax(-1)[0, 3].item()


def test_edits_change_the_order_but_neither_the_logits_nor_their_log_probabilities():
    logits = logits_of(1)
    before = logits.clone()
    bias = Edits(1, np.array([[0.0], [4.0], [100.0], [1.0], [0.0]]))
    ranking = LocalLogits(logits).rank(Wanted((bias,), num_ranked=2, num_top=1))
    found = ranking.candidates()
    assert found.best.tolist() == [4] and torch.equal(logits, before)
    assert found.block.logprobs.known[0, 0] == before.log_softmax(-1)[0, 4].item()
