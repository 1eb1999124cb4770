"""Trees of rows: ancestors, what a convolution sees, and the delta rule on every path."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from luceasync.models.gated_delta import delta_path, delta_tree
from luceasync.models.trees import ROOT, Trees, ancestry
from tests.reference.gated_delta import delta_rule

HEADS, KEY_DIM, VALUE_DIM = 2, 8, 6


def random_tree(num_rows: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [ROOT, *(choose.randrange(row) for row in range(1, num_rows))]


def make_inputs(num_rows: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(1, num_rows, HEADS, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(randn(KEY_DIM), dim=-1) for _ in range(2))
    return q, k, randn(VALUE_DIM), -3 * randn().abs(), randn().sigmoid()


def test_ancestors_are_a_row_and_its_path_to_the_root():
    assert ancestry([ROOT, 0, 0, 1, 3]) == [[0], [1, 0], [2, 0], [3, 1, 0], [4, 3, 1, 0]]


@pytest.mark.parametrize("parents", [[0], [ROOT, ROOT], [ROOT, 1], [ROOT, 2, 0]], ids=str)
def test_rows_that_form_no_tree_are_our_own_mistake(parents: list[int]):
    with pytest.raises(AssertionError, match="no tree"):
        ancestry(parents)


def test_a_convolution_sees_the_last_inputs_of_its_own_path():
    """Window of three committed inputs (0, 1, 2), rows from 3 on."""
    trees = Trees.of([[ROOT, 0, 0, 1, 3]], 4, torch.device("cpu"))
    assert trees.taps[0].tolist() == [
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [1, 2, 3, 5],
        [2, 3, 4, 6],
        [3, 4, 6, 7],
    ]


@pytest.mark.parametrize("num_rows", [1, 2, 8, 23, 60])
@pytest.mark.parametrize("seed", range(3))
def test_every_path_of_a_tree_is_the_recurrence(num_rows: int, seed: int):
    parents, inputs = random_tree(num_rows, seed), make_inputs(num_rows, seed)
    state = torch.randn(1, HEADS, KEY_DIM, VALUE_DIM)
    ancestors = Trees.of([parents], 1, torch.device("cpu")).ancestors
    out, u, totals = delta_tree(*inputs, state, ancestors)
    for row, line in enumerate(ancestry(parents)):
        path = line[::-1]
        truth, moved = delta_rule(*(x[:, path] for x in inputs), state)
        torch.testing.assert_close(out[0, row].double(), truth[0, -1], rtol=0, atol=1e-5)
        k = inputs[1][0].transpose(0, 1)[:, path]
        found = delta_path(state[0], k, u[0][:, path], totals[0][:, path])
        torch.testing.assert_close(found.double(), moved[0], rtol=0, atol=1e-5)


def test_what_verification_keeps_does_not_grow_with_the_state():
    """Per row and head: key_dim + value_dim + 1 numbers."""
    _, u, totals = delta_tree(
        *make_inputs(5, 0),
        torch.zeros(1, HEADS, KEY_DIM, VALUE_DIM),
        torch.ones(1, 5, 5, dtype=torch.bool).tril(),
    )
    assert u.numel() + totals.numel() == 5 * HEADS * (VALUE_DIM + 1)
