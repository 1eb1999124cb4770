"""Trees of rows: ancestors, what a convolution sees, and the delta rule on every path."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from luceasync.models.mixers.gated_delta import delta_path, delta_tree
from luceasync.models.trees import ROOT, Trees, chain, torch_trees
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


def trees_of(parents: list[int], reach: int = 1) -> Trees:
    return torch_trees(torch.tensor([parents], dtype=torch.int32), reach)


def path_to(parents: list[int], row: int) -> list[int]:
    path = [row]
    while parents[path[-1]] != ROOT:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("num_rows", [1, 2, 5, 22, 60])
def test_ancestors_are_a_row_and_its_path_to_the_root(num_rows: int):
    parents = random_tree(num_rows, num_rows)
    trees = trees_of(parents)
    for row in range(num_rows):
        path = path_to(parents, row)
        assert trees.ancestors[0, row].nonzero().flatten().tolist() == path
        assert trees.depths[0, row] == len(path) - 1


def test_rows_of_a_chain_follow_each_other():
    parents = chain(2, 4, torch.device("cpu"))
    assert parents.tolist() == [[ROOT, 0, 1, 2]] * 2 and parents.dtype == torch.int32


def test_a_convolution_sees_the_last_inputs_of_its_own_path():
    """Window of three committed inputs (0, 1, 2), rows from 3 on."""
    assert trees_of([ROOT, 0, 0, 1, 3], 4).taps[0].tolist() == [
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
    out, u, totals = delta_tree(*inputs, state, trees_of(parents).ancestors)
    for row in range(num_rows):
        path = path_to(parents, row)
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
