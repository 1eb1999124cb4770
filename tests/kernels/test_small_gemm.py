"""Products of up to 64 rows equal torch's, and the bits of a row do not depend on the others."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from luceasync.kernels.small_gemm import MAX_ROWS, linear, swiglu, tile
from tests.kernels.cases import TOLERANCE, distance, random


@pytest.fixture(params=[(70, 96), (33, 80), (64, 1536)], ids=["70x96", "33x80", "64x1536"])
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Outputs and dim; the first two are not multiples of a tile, the last is split."""
    return request.param


@pytest.mark.parametrize("num_rows", [9, 22, MAX_ROWS])
def test_linear_is_as_torch_computes_it(shape, num_rows, dtype, device) -> None:
    outputs, dim = shape
    x = random(num_rows, dim, dtype=dtype, device=device)
    weight = random(outputs, dim, dtype=dtype, device=device)
    truth = F.linear(x.double(), weight.double())
    assert distance(linear(x, weight), truth) < TOLERANCE[dtype]


def test_a_residual_is_added(shape, dtype, device) -> None:
    outputs, dim = shape
    x = random(11, dim, dtype=dtype, device=device)
    weight = random(outputs, dim, dtype=dtype, device=device)
    residual = random(11, outputs, dtype=dtype, device=device)
    truth = residual.double() + F.linear(x.double(), weight.double())
    assert distance(linear(x, weight, residual), truth) < TOLERANCE[dtype]


def test_swiglu_is_as_torch_computes_it(shape, dtype, device) -> None:
    inner, dim = shape
    x = random(17, dim, dtype=dtype, device=device)
    gate_up = random(2 * inner, dim, scale=dim**-0.5, dtype=dtype, device=device)
    gate, up = F.linear(x.double(), gate_up.double()).chunk(2, -1)
    assert distance(swiglu(x, gate_up), F.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.usefixtures("rows_by_themselves")
@pytest.mark.parametrize("dim", [1100, 1024], ids=["masked", "even"])
@pytest.mark.parametrize("together", [16, 22, MAX_ROWS])
def test_a_row_does_not_depend_on_the_others(together, dim, dtype, device) -> None:
    x = random(together, dim, dtype=dtype, device=device)
    weight = random(140, dim, dtype=dtype, device=device)
    few = x[-9:].contiguous()
    assert torch.equal(linear(x, weight)[-9:], linear(few, weight))
    assert torch.equal(swiglu(x, weight)[-9:], swiglu(few, weight))


TILES = [
    (outputs, dim, paired)
    for outputs, dim in ((512, 1024), (2560, 4096), (2560, 9728), (9728, 2560), (151936, 2560))
    for paired in (False, True)
]
KIB = (64, 99, 163, 227)


@pytest.mark.parametrize("shape", TILES, ids=str)
def test_the_order_of_sums_does_not_depend_on_the_rows(shape) -> None:
    tiles = [_tile(shape, rows, 2, kib) for rows in (16, 32, 64) for kib in KIB]
    assert len({(t.block_k, t.num_splits) for t in tiles}) == 1


@pytest.mark.parametrize("kib", KIB)
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_tile_fits_the_shared_memory(rows, kib) -> None:
    for shape, element_bytes in itertools.product(TILES, (2, 4)):
        t = _tile(shape, rows, element_bytes, kib)
        stage_bytes = (t.block_n * (1 + shape[2]) + rows) * t.block_k * element_bytes
        assert t.num_stages * stage_bytes <= kib * 1024


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("shape", TILES, ids=str)
def test_programs_that_all_run_at_once_have_a_multiprocessor_each(shape, rows) -> None:
    t = _tile(shape, rows, 2, 227)
    alone = -(-shape[0] // t.block_n) * t.num_splits <= 132 and t.block_n == 64
    stage_bytes = (t.block_n * (1 + shape[2]) + rows) * t.block_k * 2
    assert (2 * t.num_stages * stage_bytes > 227 * 1024) or not alone


@pytest.mark.parametrize("shape", TILES, ids=str)
def test_every_program_of_a_split_has_columns(shape) -> None:
    t = _tile(shape, 16, 2, 227)
    steps = -(-shape[1] // t.block_k)
    assert (t.num_splits - 1) * -(-steps // t.num_splits) < steps


def _tile(shape, rows, element_bytes, kib):
    outputs, dim, paired = shape
    return tile(
        outputs,
        dim,
        rows,
        paired=paired,
        element_bytes=element_bytes,
        shared_bytes=kib * 1024,
        num_multiprocessors=132,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2560, 9728), (6144, 2560), (12352, 2560)], ids=str)
def test_big_weights_give_a_row_the_same_bits_in_any_company(shape, device) -> None:
    x = random(MAX_ROWS, shape[1], dtype=torch.bfloat16, device=device)
    weight = random(*shape, dtype=torch.bfloat16, device=device)
    together = linear(x, weight)
    for num_rows in (9, 16, 17, 22, 32, 33, 63):
        assert torch.equal(linear(x[:num_rows], weight), together[:num_rows])
    assert torch.equal(linear(x, weight), together)
    assert distance(together, x.double() @ weight.double().t()) < 1e-2
