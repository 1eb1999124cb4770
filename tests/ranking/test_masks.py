"""What a mask leaves out is never found, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luceasync.ranking.local import LocalLogits, apply_masks
from luceasync.ranking.logits import NO_TOKEN, Edits, Masks, RankRequest


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
