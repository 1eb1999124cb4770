"""Gated DeltaNet over lanes: rows in pieces, and the states they may touch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from luceasync.models.mixers.delta import DeltaSpec
from luceasync.models.mixers.delta_sizes import DeltaParameters
from luceasync.models.mixers.delta_torch import TorchDelta
from luceasync.models.pass_rows import NO_LANE, Entry, Rows

EPS = 1e-6


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


DELTA = DeltaSpec(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3, conv_kernel=4)


def make_parameters() -> DeltaParameters:
    return DeltaParameters(
        conv=randn(DELTA.conv_channels, 4, seed=1),
        decay_rate=-randn(2, seed=2).exp(),
        dt_bias=randn(2, seed=3),
        norm=randn(3, seed=4),
        eps=EPS,
    )


def make_delta_state() -> tuple[Tensor, Tensor]:
    """Convolution windows and states of three lanes and the one for padding."""
    return randn(4, 3, DELTA.conv_channels, seed=5), randn(4, 2, 4, 3, seed=6)


def run_delta(projected: Tensor, state: tuple[Tensor, Tensor], lanes: list[int]) -> Tensor:
    positions = torch.arange(projected.shape[1], dtype=torch.int32).repeat(len(lanes), 1)
    entries = tuple(Entry(lane, 0, 0, slice(0, 0), slice(0, 0)) for lane in lanes)
    rows = Rows(entries, torch.tensor(lanes, dtype=torch.int32), positions, torch.empty(0), {})
    return TorchDelta(DELTA).delta(projected, make_parameters(), *state, rows)


def delta_projected(entries: int, rows: int) -> Tensor:
    return randn(entries, rows, DELTA.conv_channels + DELTA.output_dim + 4, seed=9)


@pytest.mark.parametrize("cuts", [[1], [2], [3, 4], [1, 2, 3, 4, 5], [66]])
def test_delta_rows_may_come_in_any_portions(cuts: list[int]):
    projected, whole_state, state = delta_projected(1, 70), make_delta_state(), make_delta_state()
    whole = run_delta(projected, whole_state, [1])
    bounds = zip([0, *cuts], [*cuts, 70], strict=True)
    parts = torch.cat([run_delta(projected[:, b:e], state, [1]) for b, e in bounds], 1)
    for ours, expected in zip([parts, *state], [whole, *whole_state], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_delta_moves_only_the_lanes_of_its_entries(rows: int):
    state, before = make_delta_state(), make_delta_state()
    run_delta(delta_projected(2, rows), state, [2, 0])
    for now, then in zip(state, before, strict=True):
        moved = [not torch.equal(a, b) for a, b in zip(now, then, strict=True)]
        assert moved == [True, False, True, False]


def test_in_which_order_lanes_take_a_step_changes_no_bit():
    rising, falling, projected = make_delta_state(), make_delta_state(), delta_projected(2, 1)
    out = run_delta(projected, rising, [1, 2])  # consecutive lanes are updated in place
    assert torch.equal(run_delta(projected.flip(0), falling, [2, 1]).flip(0), out)
    for a, b, before in zip(rising, falling, make_delta_state(), strict=True):
        assert torch.equal(a, b)
        assert [torch.equal(*pair) for pair in zip(a, before, strict=True)] == [1, 0, 0, 1]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_delta_padding_alone_is_zeros_and_moves_nothing(num_rows: int):
    state = make_delta_state()
    out = run_delta(delta_projected(2, num_rows), state, [NO_LANE, NO_LANE])
    assert torch.equal(out, torch.zeros(2, num_rows, DELTA.output_dim))
    assert all(torch.equal(*pair) for pair in zip(state, make_delta_state(), strict=True))


def test_delta_padding_changes_no_lane():
    projected, alone, padded = delta_projected(3, 1), make_delta_state(), make_delta_state()
    out = run_delta(projected[:1], alone, [1])
    together = run_delta(projected, padded, [1, NO_LANE, NO_LANE])
    torch.testing.assert_close(together[:1], out, rtol=0, atol=1e-6)
    for a, b in zip(alone, padded, strict=True):
        torch.testing.assert_close(a[:3], b[:3], rtol=0, atol=1e-6)
