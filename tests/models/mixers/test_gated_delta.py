"""Chunks and steps, cut anywhere, equal the recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from luceasync.models.mixers.gated_delta import delta_chunks, delta_step
from tests.reference.gated_delta import delta_rule

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
TOLERANCE = 2e-5


def make_inputs(rows: int, *, batch: int = 2, heads: int = 2, seed: int = 0) -> Inputs:
    """q, k, v, g, beta with key_dim 8 and value_dim 6."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(batch, rows, heads, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(randn(8), dim=-1) for _ in range(2))
    return q, k, randn(6), -randn().abs(), randn().sigmoid()


def make_state(batch: int = 2, heads: int = 2) -> Tensor:
    return torch.randn(batch, heads, 8, 6, generator=torch.Generator().manual_seed(99))


def step_by_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state.clone()
    outputs = [delta_step(*(x[:, t] for x in inputs), state) for t in range(inputs[0].shape[1])]
    return torch.stack(outputs, 1), state


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, truth in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), truth, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 130, 200])
def test_chunks_are_the_recurrence(rows: int):
    inputs, state = make_inputs(rows), make_state()
    assert_close(delta_chunks(*inputs, state)[:2], delta_rule(*inputs, state))


@pytest.mark.parametrize("rows", [1, 2, 70])
def test_steps_are_the_recurrence(rows: int):
    inputs, state = make_inputs(rows), make_state()
    assert_close(step_by_step(inputs, state), delta_rule(*inputs, state))


@pytest.mark.parametrize(
    "run", [lambda *x: delta_chunks(*x)[:2], lambda *x: step_by_step(x[:5], x[5])]
)
def test_strong_decay_neither_overflows_nor_gives_nan(run):
    q, k, v, _, beta = make_inputs(130)
    strengths = torch.tensor([-500.0, -0.01, -90.0, -1e-6])
    g = strengths[torch.randint(4, (2, 130, 2), generator=torch.Generator().manual_seed(3))]
    out, state = run(q, k, v, g, beta, make_state())
    expected_out, expected_state = delta_rule(q, k, v, g, beta, make_state())
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, rtol=0, atol=1e-5)


def test_rows_without_decay_and_beta_leave_the_state_as_it_is():
    q, k, v, g, beta = make_inputs(70)
    inputs = (q, k, v, torch.zeros_like(g), torch.zeros_like(beta))
    _, state, _ = delta_chunks(*inputs, make_state())
    assert torch.equal(state, make_state())


def test_the_entries_of_a_batch_do_not_mix():
    inputs, state = make_inputs(70, batch=3), make_state(batch=3)
    together = delta_chunks(*inputs, state)
    for b in range(3):
        alone = delta_chunks(*(x[b : b + 1] for x in inputs), state[b : b + 1])
        assert_close((together[0][b], together[1][b]), (alone[0][0].double(), alone[1][0].double()))


def test_inputs_are_left_as_they_are_and_by_chunks_the_state_too():
    given_, state = make_inputs(65), make_state()
    copies = [x.clone() for x in (*given_, state)]
    delta_chunks(*given_, state)
    delta_step(*(x[:, 0] for x in given_), state.clone())
    assert all(torch.equal(a, b) for a, b in zip((*given_, state), copies, strict=True))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(2, 150), share=st.floats(0, 1), seed=st.integers(0, 2**16))
def test_rows_may_be_cut_anywhere(rows: int, share: float, seed: int):
    inputs, state = make_inputs(rows, batch=1, heads=1, seed=seed), make_state(1, 1)
    cut = min(rows - 1, 1 + int(share * rows))
    whole = delta_chunks(*inputs, state, cut)
    first, between, _ = delta_chunks(*(x[:, :cut] for x in inputs), state)
    second, end, _ = delta_chunks(*(x[:, cut:] for x in inputs), between)
    assert_close((torch.cat([first, second], 1), end, between), tuple(x.double() for x in whole))


def test_the_state_at_a_mark_stays_exact_after_a_strong_decay():
    q, k, v, g, beta = make_inputs(100)
    g[:, 3] = -5e4
    inputs = (q, k, v, g, beta)
    _, expected = delta_rule(*(x[:, :90] for x in inputs), make_state())
    _, _, at_mark = delta_chunks(*inputs, make_state(), 90)
    torch.testing.assert_close(at_mark.double(), expected, rtol=0, atol=TOLERANCE)
