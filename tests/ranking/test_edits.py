"""Edits of single logits, one part after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luceasync.ranking.local import apply_edits
from luceasync.ranking.logits import Edits


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
