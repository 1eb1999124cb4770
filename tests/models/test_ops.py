"""The operations compared with float64."""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.models.ops import TorchOps, rms_norm
from tests.reference import attention as truth

OPS = TorchOps()
EPS = 1e-6


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rms_norm_is_computed_in_float32_and_given_back_in_the_dtype_that_came():
    x, weight = randn(5, 32, dtype=torch.bfloat16), randn(32, seed=1)
    out = rms_norm(x, weight, EPS)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, truth.rms_norm(x, weight, EPS).float().bfloat16())


def test_weights_and_norms_are_what_they_say():
    x, norm, weight = randn(2, 3, 8), randn(8, seed=1), randn(6, 8, seed=2)
    normed = truth.rms_norm(x, norm, EPS)
    gate, up = (normed @ weight.double().T).chunk(2, -1)
    ours, packed = OPS.norm(x, norm, EPS), OPS.pack(weight)
    cases = [
        (packed.linear(ours), normed @ weight.double().T),
        (packed.swiglu(ours), gate * gate.sigmoid() * up),
        (packed.linear_add(x, x[..., :6]), (x @ weight.T + x[..., :6]).double()),
    ]
    for found, expected in cases:
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_a_table_gives_its_rows_and_multiplies_too():
    rows, ids = randn(5, 8), torch.tensor([[4, 0], [2, 2]])
    table = OPS.table(rows)
    assert torch.equal(table.lookup(ids), rows[ids])
    assert torch.equal(table.linear(rows), rows @ rows.T)
    assert (table.num_bytes, table.dtype) == (5 * 8 * 4, torch.float32)
