"""Row operations of prefill, as torch computes them."""

import pytest
import torch

from luceasync.kernels.rows import geglu, norm_values, rms_norm, swiglu
from luceasync.models import ops
from luceasync.models.triton_ops import TritonOps
from tests.kernels.cases import TOLERANCE, distance, random


def test_rms_norm_is_as_torch_computes_it(dtype, device) -> None:
    x = random(19, 80, dtype=dtype, device=device)
    weight = 1 + random(80, scale=0.1, dtype=torch.float32, device=device)
    truth = ops.rms_norm(x.float(), weight, 1e-6)
    assert distance(rms_norm(x, weight, 1e-6), truth) < TOLERANCE[dtype]


def test_what_is_added_to_is_rounded_as_apart(dtype, device) -> None:
    x, residual = (random(19, 80, dtype=dtype, device=device) for _ in range(2))
    weight = 1 + random(80, scale=0.1, dtype=torch.float32, device=device)
    apart = residual + rms_norm(x, weight, 1e-6)
    factor = torch.tensor([0.3], device=device)
    sums = rms_norm(x, weight, 1e-6, residual), rms_norm(x, weight, 1e-6, residual, factor)
    for got, expected in zip(sums, (apart, apart * factor.to(dtype)), strict=True):
        if dtype == torch.float32 and x.is_cuda:  # product and sum are one instruction there
            assert distance(got, expected) < TOLERANCE[dtype]
        else:
            assert torch.equal(got, expected)


@pytest.mark.parametrize("begin", [48, 96])  # values that are keys too, or have columns
def test_normed_values_stand_behind_keys(dtype, device, begin: int) -> None:
    projected = random(19, begin + 48, dtype=dtype, device=device)
    expected = ops.TorchOps().norm_values(projected, begin, 96, 24, 1e-6)
    assert distance(norm_values(projected, begin, 96, 24, 1e-6), expected) < TOLERANCE[dtype]


def test_geglu_is_as_torch_computes_it(dtype, device) -> None:
    gate_up = random(3, 2 * 2100, scale=3.0, dtype=dtype, device=device)
    gate, up = gate_up.float().chunk(2, -1)
    truth = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert distance(geglu(gate_up), truth) < TOLERANCE[dtype]


def test_swiglu_is_as_torch_computes_it(dtype, device) -> None:
    gate_up = random(3, 2 * 2100, dtype=dtype, device=device)
    gate, up = gate_up.float().chunk(2, -1)
    truth = torch.nn.functional.silu(gate) * up
    assert distance(swiglu(gate_up), truth) < TOLERANCE[dtype]


def test_many_rows_take_the_same_operations_as_few(dtype, device) -> None:
    x = random(1, 20, 48, dtype=dtype, device=device)
    weight = TritonOps().pack(random(64, 48, scale=0.1, dtype=dtype, device=device))
    many = weight.swiglu(x)
    assert distance(weight.swiglu(x[:, :8]), many[:, :8]) < TOLERANCE[dtype]
