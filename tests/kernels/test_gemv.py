"""Products of few rows equal torch's, and the bits of a row do not depend on the others."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from luceasync.kernels.gemv import MAX_ROWS, linear, swiglu, tile
from tests.kernels.cases import TOLERANCE, distance, random


@pytest.fixture(params=[(70, 96), (33, 80), (48, 1536)], ids=["70x96", "33x80", "48x1536"])
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Outputs and dim; the first two are not multiples of a tile."""
    return request.param


@pytest.mark.parametrize("num_rows", [1, 9, MAX_ROWS])
def test_linear_is_as_torch_computes_it(shape, num_rows, dtype, device) -> None:
    outputs, dim = shape
    x = random(num_rows, dim, dtype=dtype, device=device)
    weight = random(outputs, dim, dtype=dtype, device=device)
    truth = F.linear(x.double(), weight.double())
    assert distance(linear(x, weight), truth) < TOLERANCE[dtype]


def test_a_residual_is_added(shape, dtype, device) -> None:
    outputs, dim = shape
    x = random(5, dim, dtype=dtype, device=device)
    weight = random(outputs, dim, dtype=dtype, device=device)
    residual = random(5, outputs, dtype=dtype, device=device)
    truth = residual.double() + F.linear(x.double(), weight.double())
    assert distance(linear(x, weight, residual), truth) < TOLERANCE[dtype]


def test_swiglu_is_as_torch_computes_it(shape, dtype, device) -> None:
    inner, dim = shape
    x = random(2, dim, dtype=dtype, device=device)
    gate_up = random(2 * inner, dim, scale=dim**-0.5, dtype=dtype, device=device)
    gate, up = F.linear(x.double(), gate_up.double()).chunk(2, -1)
    assert distance(swiglu(x, gate_up), F.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dim", [1100, 1024], ids=["masked", "preloaded"])
@pytest.mark.parametrize("together", [2, 8, MAX_ROWS])
def test_a_row_does_not_depend_on_the_others(together, dim, dtype, device) -> None:
    x = random(together, dim, dtype=dtype, device=device)
    weight = random(140, dim, dtype=dtype, device=device)
    last = x[-1:].contiguous()
    assert torch.equal(linear(x, weight)[-1:], linear(last, weight))
    assert torch.equal(swiglu(x, weight)[-1:], swiglu(last, weight))


@pytest.mark.parametrize("paired", [False, True], ids=["single", "paired"])
def test_the_order_of_sums_depends_on_the_dtype_alone(paired) -> None:
    tiles = [
        tile(outputs, rows, paired=paired, element_bytes=2, shared_bytes=kib * 1024)
        for outputs in (512, 2560, 9728, 151936)
        for rows in (8, MAX_ROWS)
        for kib in (64, 99, 163, 227)
    ]
    assert len({(t.block_k, t.split) for t in tiles}) == 1


@pytest.mark.parametrize("kib", [64, 99, 163, 227])
@pytest.mark.parametrize("rows", [8, MAX_ROWS])
def test_a_tile_fits_the_shared_memory(rows, kib) -> None:
    for outputs, paired in itertools.product((512, 2560, 9728, 151936), (False, True)):
        t = tile(outputs, rows, paired=paired, element_bytes=4, shared_bytes=kib * 1024)
        step = (t.block_n * (1 + paired) + rows) * t.split * t.block_k * 4
        assert t.num_stages >= 2 and (t.num_stages - 1 + t.preload) * step <= kib * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2560, 9728), (6144, 2560), (12352, 2560)], ids=str)
def test_big_weights_give_a_row_the_same_bits_in_any_company(shape, device) -> None:
    x = random(MAX_ROWS, shape[1], dtype=torch.bfloat16, device=device)
    weight = random(*shape, dtype=torch.bfloat16, device=device)
    together = linear(x, weight)
    for num_rows in range(1, MAX_ROWS):
        assert torch.equal(linear(x[:num_rows], weight), together[:num_rows])
    assert distance(together, x.double() @ weight.double().t()) < 1e-2
