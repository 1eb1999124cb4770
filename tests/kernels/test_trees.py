"""Ancestors, depths and taps, as torch computes them."""

import pytest
import torch

from luceasync.models.trees import TorchTrees, chain
from luceasync.models.triton_trees import TritonTrees
from tests.kernels.cases import random_parents


@pytest.mark.parametrize("num_rows", [1, 2, 8, 22, 60])
@pytest.mark.parametrize("reach", [1, 4])
def test_a_tree_has_the_shape_that_torch_computes(num_rows, reach, device) -> None:
    parents = random_parents(3, num_rows).to(device)
    expected = TorchTrees().trees(parents, reach)
    found = TritonTrees().trees(parents, reach)
    assert torch.equal(found.ancestors, expected.ancestors)
    assert torch.equal(found.depths, expected.depths)
    assert torch.equal(found.taps.long(), expected.taps)


def test_a_chain_needs_no_memory_of_its_own(device) -> None:
    found = TritonTrees().trees(chain(2, 5, device), 1)
    assert torch.equal(found.ancestors[1], torch.ones(5, 5, dtype=torch.bool, device=device).tril())
