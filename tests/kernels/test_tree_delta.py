"""Gated DeltaNet of trees against torch in float32: outputs, and the scratch that a commit
needs.
"""

import pytest
import torch

from luceasync.kernels import tree_delta
from luceasync.kernels.overlap import shared_bytes
from luceasync.kernels.small_tree_delta import is_small
from luceasync.models.mixers.delta import DeltaSpec
from luceasync.models.mixers.delta_torch import TorchDelta
from luceasync.models.mixers.delta_triton import TritonDelta
from luceasync.models.pass_rows import NO_LANE
from luceasync.models.trees import chain, torch_trees
from tests.kernels.cases import (
    TOLERANCE,
    DeltaCase,
    delta_case,
    delta_scratch,
    distance,
    random_parents,
)

SPECS = {
    "heads shared": DeltaSpec(2, 4, 32, 16, 4),
    "wide values": DeltaSpec(1, 1, 16, 64, 3),
    "below a tile": DeltaSpec(1, 2, 8, 24, 2),
    "three values a key": DeltaSpec(2, 6, 16, 32, 4),
}
LAUNCHES = ("one", "three")


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request: pytest.FixtureRequest) -> DeltaSpec:
    return request.param


@pytest.fixture(params=LAUNCHES)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small trees in one launch, and in three, as when they do not fit."""
    monkeypatch.setattr(tree_delta, "is_small", lambda *sizes, is_hip: request.param == "one")


def run(body, case: DeltaCase, parents: torch.Tensor):
    """Output and scratch."""
    scratch = delta_scratch(case)
    trees = torch_trees(parents.to(case.projected.device), case.spec.conv_kernel)
    states = (case.conv_state, case.delta_state)
    small = (case.parameters, *states)
    out = body(case.spec).delta_tree(case.projected, *small, case.rows, trees, scratch)
    return out, scratch


def check_against_torch(case: DeltaCase, parents: torch.Tensor, dtype: torch.dtype) -> None:
    before = case.copy()
    expected, truth = run(TorchDelta, case, parents)
    out, scratch = run(TritonDelta, case, parents)
    assert distance(out, expected) < TOLERANCE[dtype]
    assert torch.equal(scratch[0], truth[0])
    for found, exact in zip(scratch[1:], truth[1:], strict=True):
        assert distance(found, exact) < TOLERANCE[dtype]
    assert torch.equal(case.delta_state, before.delta_state)
    assert torch.equal(case.conv_state, before.conv_state)


@pytest.mark.covered(2)
@pytest.mark.usefixtures("launches")
def test_rows_follow_their_parents(spec, dtype, device) -> None:
    check_against_torch(delta_case(spec, [1, 0], 9, dtype, device), random_parents(2, 9), dtype)


@pytest.mark.covered(2)
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("num_rows", [1, 2, 16])
def test_chains_run_as_trees_do(num_rows, dtype, device) -> None:
    case = delta_case(SPECS["three values a key"], [0, 1], num_rows, dtype, device)
    parents = chain(2, num_rows, torch.device("cpu"))
    check_against_torch(case, parents, dtype)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 22, 60])
def test_trees_of_any_size_are_run(num_rows, dtype, device) -> None:
    case = delta_case(SPECS["heads shared"], [1], num_rows, dtype, device)
    check_against_torch(case, random_parents(1, num_rows), dtype)


@pytest.mark.usefixtures("launches")
def test_padding_gives_zeros_and_leaves_no_trace(dtype, device) -> None:
    case = delta_case(SPECS["heads shared"], [0, 1], 5, dtype, device)
    case.rows.lanes[1] = NO_LANE
    out, scratch = run(TritonDelta, case, random_parents(2, 5))
    assert (out[1] == 0).all() and (out[0] != 0).any()
    assert all((kept[1] == 9).all() for kept in scratch)


@pytest.mark.parametrize(
    ("sizes", "small"),
    [
        ((16, 128, 128, 99 * 1024), True),
        ((1, 8, 24, 99 * 1024), True),
        ((17, 128, 128, 227 * 1024), False),
        ((16, 256, 128, 227 * 1024), False),
        ((16, 128, 128, 64 * 1024), False),
    ],
)
def test_one_launch_is_for_few_rows_of_heads_that_fit(sizes, small) -> None:
    assert is_small(*sizes, is_hip=False) is small
    assert not is_small(*sizes, is_hip=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 16])
def test_one_launch_gives_what_three_give(num_rows, device, monkeypatch) -> None:
    case = delta_case(DeltaSpec(16, 48, 128, 128, 4), [1, 0], num_rows, torch.bfloat16, device)
    parents = random_parents(2, num_rows)
    assert is_small(num_rows, 128, 128, shared_bytes(case.projected), is_hip=False)
    out, scratch = run(TritonDelta, case, parents)
    monkeypatch.setattr(tree_delta, "is_small", lambda *sizes, is_hip: False)
    expected, truth = run(TritonDelta, case, parents)
    for found, exact in zip((out, *scratch), (expected, *truth), strict=True):
        assert distance(found, exact) < 2e-3
    assert torch.equal(scratch[0], truth[0])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [8, 16, 60])
def test_a_layer_of_a_big_model_runs_as_torch_computes_it(num_rows, device) -> None:
    case = delta_case(DeltaSpec(16, 32, 128, 128, 4), [1, 0], num_rows, torch.bfloat16, device)
    check_against_torch(case, random_parents(2, num_rows), torch.bfloat16)
