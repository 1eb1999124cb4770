"""Gated DeltaNet kernels against torch in float32: outputs and both states, one row and many."""

from dataclasses import replace

import pytest
import torch

from luceasync.models.mixers.delta import DeltaSpec
from luceasync.models.mixers.delta_torch import TorchDelta
from luceasync.models.mixers.delta_triton import TritonDelta
from luceasync.models.pass_rows import NO_LANE, Entry
from tests.kernels.cases import TOLERANCE, DeltaCase, delta_case, distance

SPECS = {
    "heads shared": DeltaSpec(2, 4, 32, 16, 4),
    "wide values": DeltaSpec(1, 1, 16, 64, 3),
    "below a tile": DeltaSpec(1, 2, 8, 24, 2),
}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request: pytest.FixtureRequest) -> DeltaSpec:
    return request.param


def check_against_torch(case: DeltaCase, dtype: torch.dtype) -> tuple[DeltaCase, DeltaCase]:
    """The results of torch and of the kernels."""
    truth, found = case.copy(), case.copy()
    expected = truth.run(TorchDelta)
    out = found.run(TritonDelta)
    assert distance(out, expected) < TOLERANCE[dtype]
    assert distance(found.delta_state[:-1], truth.delta_state[:-1]) < TOLERANCE[dtype]
    assert torch.equal(found.conv_state[:-1], truth.conv_state[:-1])
    return truth, found


def test_one_row_steps_as_torch_computes_it(spec, dtype, device) -> None:
    check_against_torch(delta_case(spec, [1, 0], 1, dtype, device), dtype)


@pytest.mark.covered(1)
@pytest.mark.parametrize("num_rows", [2, 64, 150])
def test_many_rows_run_as_torch_computes_them(spec, num_rows, dtype, device) -> None:
    check_against_torch(delta_case(spec, [1], num_rows, dtype, device), dtype)


@pytest.mark.covered(1)
@pytest.mark.parametrize(("mark", "num_rows"), [(1, 2), (64, 70), (65, 66), (100, 150)])
def test_the_states_within_a_chunk_are_those_of_torch(mark, num_rows, dtype, device) -> None:
    case = delta_case(SPECS["heads shared"], [1], num_rows, dtype, device)
    entry = Entry(1, 0, num_rows, slice(0, num_rows), slice(0, num_rows))
    short = replace(case, projected=case.projected[:, :mark]).copy()
    case = replace(case, rows=replace(case.rows, entries=(entry,), mark=mark))
    truth, found = check_against_torch(case, dtype)
    short.run(TritonDelta)
    assert distance(found.delta_state[NO_LANE], truth.delta_state[NO_LANE]) < TOLERANCE[dtype]
    assert torch.equal(found.conv_state[NO_LANE], truth.conv_state[NO_LANE])
    assert torch.equal(found.delta_state[NO_LANE], short.delta_state[1])


def test_keys_that_repeat_stay_exact(device) -> None:
    case = delta_case(SPECS["heads shared"], [0], 128, torch.float32, device)
    case.projected[:] = case.projected[:, :1]  # the same row 128 times: the hardest system to solve
    case.parameters.decay_rate.fill_(-1e-3)
    check_against_torch(case, torch.float32)


@pytest.mark.parametrize("num_rows", [1, 70])
def test_padding_gives_zeros_and_changes_no_lane(num_rows, dtype, device) -> None:
    case = delta_case(SPECS["heads shared"], [0, 1], num_rows, dtype, device)
    case.rows.lanes[1] = NO_LANE
    before = case.copy()
    out = case.run(TritonDelta)
    assert (out[1] == 0).all() and (out[0] != 0).any()
    assert torch.equal(case.delta_state[1:], before.delta_state[1:])
    assert torch.equal(case.conv_state[1:], before.conv_state[1:])


def test_a_row_does_not_depend_on_other_lanes(dtype, device) -> None:
    case = delta_case(SPECS["heads shared"], [0, 1, 2], 1, dtype, device)
    together = case.copy().run(TritonDelta)
    case.projected[0] = 2
    case.delta_state[2].zero_()
    assert torch.equal(case.run(TritonDelta)[1], together[1])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2048])
def test_a_layer_of_a_big_model_runs_as_torch_computes_it(num_rows, device) -> None:
    spec = DeltaSpec(16, 32, 128, 128, 4)
    check_against_torch(delta_case(spec, [1], num_rows, torch.bfloat16, device), torch.bfloat16)
