"""Ancestors, depths and taps, as torch computes them."""

import pytest
import torch

from luceasync.models.trees import chain, torch_trees
from luceasync.models.triton_ops import TritonOps
from tests.kernels.cases import random_parents


@pytest.mark.parametrize("num_rows", [1, 2, 8, 22, 60])
@pytest.mark.parametrize("reach", [1, 4])
def test_a_tree_has_the_shape_that_torch_computes(num_rows, reach, device) -> None:
    parents = random_parents(3, num_rows).to(device)
    expected = torch_trees(parents, reach)
    found = TritonOps().trees(parents, reach)
    assert torch.equal(found.ancestors, expected.ancestors)
    assert torch.equal(found.depths, expected.depths)
    assert torch.equal(found.taps.long(), expected.taps)


def test_a_chain_needs_no_memory_of_its_own(device) -> None:
    found = TritonOps().trees(chain(2, 5, device), 1)
    assert torch.equal(found.ancestors[1], torch.ones(5, 5, dtype=torch.bool, device=device).tril())
