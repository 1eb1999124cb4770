"""Rotations, row indices and the shape of proposals, as torch computes them."""

import math
from dataclasses import replace

import pytest
import torch

from luceasync.kernels.positions import rotation, row_indices
from luceasync.models.mixers import attention_torch
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_triton import TritonAttention
from luceasync.models.ops import TorchOps
from luceasync.models.pass_rows import NO_LANE
from luceasync.models.rope import PlainRope, Rope, YarnRope
from luceasync.models.trees import chain, torch_trees
from luceasync.models.triton_ops import TritonOps
from tests.kernels.cases import random_parents

SPEC = AttentionSpec(4, 2, 64, 48, 1e7, gated=False)


@pytest.mark.parametrize("rope", [PlainRope(), YarnRope(4.0, 4096, 32.0, 1.0, 1.14, True)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 17)])
def test_rotation_is_as_torch_computes_it(shape, rope: Rope, device) -> None:
    positions = torch.randint(0, 262144, shape, dtype=torch.int32, device=device)
    spec = replace(SPEC, rope=rope)
    expected = attention_torch.TorchAttention(spec).prepare(positions)
    found = TritonAttention(spec).prepare(positions)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_the_last_position_of_a_long_context_has_an_exact_angle(device) -> None:
    positions = torch.tensor([[262143]], dtype=torch.int32, device=device)
    cos, sin = rotation(positions, torch.ones(1, device=device))
    assert (cos.item(), sin.item()) == pytest.approx((math.cos(262143), math.sin(262143)), abs=1e-6)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_row_indices_skip_absent_tokens(num_rows: int, device) -> None:
    absent = torch.tensor([0, 64, 192, 0], dtype=torch.int32, device=device)
    lanes = torch.tensor([2, 0, NO_LANE, 1], dtype=torch.int32, device=device)
    positions = 192 + torch.arange(4 * num_rows, dtype=torch.int32, device=device).view(4, -1)
    found = TritonOps().row_indices(positions, lanes, absent)
    assert torch.equal(found, TorchOps().row_indices(positions, lanes, absent))
    assert (
        torch.equal(found, row_indices(positions, lanes, absent)) and found[2, 0] == positions[2, 0]
    )


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
