"""Logits are edited, masked and ranked where they are; what comes to the host agrees with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from luceasync.ranking.local import LocalLogits, apply_edits, apply_masks
from luceasync.ranking.logits import NO_TOKEN, Edits, Masks, RankRequest
from luceasync.ranking.proposals import Proposal

VOCAB = 50


def logits_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(0))


def test_without_more_requested_only_the_highest_come():
    logits = logits_of(2, 3)
    logits[0, 1, 7] = math.nan
    found = LocalLogits(logits).rank(RankRequest()).candidates()
    best = logits.argmax(-1).flatten().tolist()
    assert found.best.tolist() == [best[0], NO_TOKEN, *best[2:]]
    assert found.block is None and found.proposal.shape == (6, 0)


def test_no_answer_is_as_wide_as_the_vocabulary():
    wanted = RankRequest(num_ranked=5, mass_at=(0.0, 0.5), num_top=3)
    block = LocalLogits(logits_of(2)).rank(wanted).candidates().block
    assert block.values.shape == block.ids.shape == (2, 5) and block.masses.shape == (2,)
    assert block.logprobs.known.shape == (2, 6) and block.logprobs.top_ids.shape == (2, 3)


def test_masses_are_of_the_rows_and_temperatures_that_were_named():
    logits = logits_of(2)
    wanted = RankRequest(num_ranked=1, mass_at=(0.0, 0.5))
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
    wanted = RankRequest(num_ranked=1, mass_at=(1.0,) * len(logits))
    return LocalLogits(logits).rank(wanted).candidates().block.masses.tolist()


def test_a_whole_row_is_ordered_by_value_and_then_by_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    ranking = LocalLogits(logits).rank(RankRequest(num_ranked=1, num_top=1))
    assert ranking.whole_row(0).ids.tolist() == [1, 2, 3, 0]
    assert ranking.whole_row(0).values.tolist() == [3.0, 3.0, 2.0, 1.0]
    assert ranking.whole_logprobs(0).ids.tolist() == [1, 2, 3, 0]
    assert ranking.logprob(0, 3) == logits.log_softmax(-1)[0, 3].item()


def test_edits_change_the_order_but_neither_the_logits_nor_their_log_probabilities():
    logits = logits_of(1)
    before = logits.clone()
    bias = Edits(1, np.array([[0.0], [4.0], [100.0], [1.0], [0.0]]))
    ranking = LocalLogits(logits).rank(RankRequest((bias,), num_ranked=2, num_top=1))
    found = ranking.candidates()
    assert found.best.tolist() == [4] and torch.equal(logits, before)
    assert found.block.logprobs.known[0, 0] == before.log_softmax(-1)[0, 4].item()


@dataclass
class Found:
    """Best tokens of four rows that are no row's highest, or `host`."""

    def __init__(self, host: Sequence[Sequence[int]] = ((7,), (8,), (9,), (10,))) -> None:
        self.num_fetched, self._host = 0, np.array(host)

    def fetch(self) -> np.ndarray:
        self.num_fetched += 1
        return self._host


def test_best_tokens_that_are_found_are_fetched_when_they_are_read() -> None:
    found = Found()
    ranking = LocalLogits(logits_of(3), found=found).rank(RankRequest())
    assert found.num_fetched == 0
    candidates = ranking.candidates()
    assert candidates.best.tolist() == [7, 8, 9] and candidates.proposal.shape == (3, 0)


def test_best_tokens_of_the_pass_serve_only_requests_for_these() -> None:
    found, raw = Found(), logits_of(3)
    logits, best = LocalLogits(raw, found=found), raw.argmax(-1).tolist()
    edits = Edits(1, np.array([[1], [5], [1e9], [1], [0]], np.float64))
    words = np.zeros((1, (raw.shape[1] + 31) // 32), np.int32)
    words[0, 0] = 1 << 4
    masks = Masks(np.array([2]), words)
    assert logits.rank(RankRequest(num_ranked=1)).candidates().best.tolist() == best
    assert logits.rank(RankRequest((edits,))).candidates().best.tolist() == [best[0], 5, best[2]]
    assert logits.rank(RankRequest(masks=masks)).candidates().best.tolist() == [*best[:2], 4]
    assert found.num_fetched == 0


@pytest.mark.parametrize("parents", [None, torch.tensor([[-1, 0, 0]], dtype=torch.int32)])
def test_a_verify_pass_that_found_the_best_tokens_brings_its_proposal_along(
    parents: torch.Tensor | None,
) -> None:
    raw = logits_of(3)
    proposal = Proposal(torch.tensor([[7, 2**40, 9]]), parents)
    host = [[7, -1, 30], [2**40, 0, 31], [9, 0, 32], [0, 0, 0]]  # the last is of padding
    logits = LocalLogits(raw[None], found=Found(host))
    for found, best in ((logits, [30, 31, 32]), (LocalLogits(raw[None]), raw.argmax(-1).tolist())):
        ranked = found.rank(RankRequest(), proposal).candidates()
        assert ranked.best.tolist() == best
        assert ranked.proposal.tolist() == proposal.columns().tolist()


# --- edits ----------------------------------------------------------------------------------------


def edit(row: int, token: int, bias=0.0, repetition=1.0, shift=0.0) -> np.ndarray:
    return np.array([[row], [token], [bias], [repetition], [shift]])


def test_bias_comes_before_repetition_and_repetition_before_the_shift():
    logits = torch.tensor([[1.0, -1.0]])
    parts = [Edits(1, np.hstack([edit(0, 0, 2.0, 2.0, 0.25), edit(0, 1, -1.0, 2.0, 0.25)]))]
    assert apply_edits(logits, parts).tolist() == [[1.25, -4.25]]
    assert logits.tolist() == [[1.0, -1.0]]


def test_a_part_is_of_several_rows_and_a_later_one_replaces_it_in_one():
    parts = [Edits(3, edit(1, 0, 5.0)), Edits(1, edit(2, 0, 7.0))]
    assert apply_edits(torch.zeros(4, 2), parts)[:, 0].tolist() == [0.0, 5.0, 7.0, 5.0]


@pytest.mark.parametrize("parts", [(), (Edits(2, np.zeros((5, 0))),)])
def test_logits_that_nothing_edits_are_not_copied(parts):
    logits = torch.zeros(2, 2)
    assert apply_edits(logits, parts) is logits


# --- masks ----------------------------------------------------------------------------------------


def random_masks(num_rows: int, num_vocab: int, rows: list[int], seed: int = 0) -> Masks:
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**31), 2**31, (len(rows), -(-num_vocab // 32)), dtype=np.int64)
    return Masks(np.array(rows, np.int64), words.astype(np.int32))


def slowly(logits: torch.Tensor, masks: Masks) -> torch.Tensor:
    """One bit after the other."""
    masked = logits.clone()
    for row, words in zip(masks.rows.tolist(), masks.words.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                masked[row, token] = -torch.inf
    return masked


@pytest.mark.parametrize("num_vocab", [1, 31, 32, 33, 50, 512])
@pytest.mark.parametrize("rows", [[0], [1, 3], [0, 1, 2, 3]])
def test_each_bit_is_a_token(num_vocab, rows):
    logits = torch.randn(4, num_vocab, generator=torch.Generator().manual_seed(1))
    before, masks = logits.clone(), random_masks(4, num_vocab, rows)
    assert torch.equal(apply_masks(logits, masks), slowly(logits, masks))
    assert torch.equal(logits, before)


def test_a_mask_comes_after_the_edits_and_leaves_logprobs_alone():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    bias = Edits(1, np.array([[0.0], [3.0], [90.0], [1.0], [0.0]]))
    masks = Masks(np.array([0]), np.array([[0b0011]], np.int32))
    wanted = RankRequest((bias,), num_ranked=4, mass_at=(1.0,), num_top=4, masks=masks)
    found = LocalLogits(logits).rank(wanted).candidates()
    assert found.best.tolist() == [1]
    assert found.block.ids[0, :2].tolist() == [1, 0]
    assert found.block.values[0].tolist() == [2.0, 1.0, -np.inf, -np.inf]
    assert found.block.masses[0] == pytest.approx(1 + np.exp(-1.0))
    assert found.block.logprobs.top_ids[0].tolist() == [3, 2, 1, 0]


def test_a_row_that_may_get_nothing_has_no_token_and_disturbs_no_other():
    logits = torch.zeros(3, 40)
    logits[:, 7] = 1.0
    masks = Masks(np.array([1]), np.zeros((1, 2), np.int32))
    assert LocalLogits(logits).rank(RankRequest(masks=masks)).candidates().best.tolist() == [
        7,
        NO_TOKEN,
        7,
    ]


def test_rows_that_have_a_mask_can_be_looked_at_alone():
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(4))
    masks = random_masks(5, 70, [1, 4])
    best = LocalLogits(logits).rank(RankRequest(masks=masks)).candidates().best
    alone = LocalLogits(logits).rank(RankRequest(masks=masks, is_of_masked=True)).candidates().best
    assert alone.tolist() == best[[1, 4]].tolist()
