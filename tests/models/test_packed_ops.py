"""Packed weights give the products of plain ones; a row does not depend on others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from luceasync.models import packed_ops
from luceasync.models.ops import TorchOps
from luceasync.models.packed_ops import (
    CACHE_VARIABLES,
    FEW_ROWS,
    MAX_PRODUCTS,
    PackedOps,
    PackedTable,
    can_pack,
)
from tests.half_precision import needs_bf16

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of torch has no oneDNN")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 1, 100), (1, 70, 256)], ids=str)
def test_products_are_those_of_plain_weights(dtype: torch.dtype, shape: tuple[int, ...]):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(77, shape[-1], dtype=dtype)
    found = PackedOps().pack(weight).linear(x)
    expected = TorchOps().pack(weight.double()).linear(x.double())
    error = (found.double() - expected).norm() / expected.norm()
    assert found.shape == expected.shape
    assert error < TOLERANCE[dtype]


def test_a_tied_head_is_taken_as_it_is():
    x, weight = torch.randn(2, 1, 64), torch.randn(512, 64)
    ours, plain = PackedOps().table(weight), TorchOps().table(weight)
    torch.testing.assert_close(ours.linear(x), plain.linear(x))
    ids = torch.tensor([3, 500])
    assert torch.equal(ours.lookup(ids), plain.lookup(ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 256, 1024])
def test_from_four_rows_on_a_row_does_not_feel_the_others(dtype: torch.dtype, width: int):
    weight = PackedOps().pack(torch.randn(3 * width, width, dtype=dtype))
    x = torch.randn(8, width, dtype=dtype)
    eight = weight.linear(x)
    for num_rows in (4, 5, 7):
        assert torch.equal(weight.linear(x[:num_rows]), eight[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_number_are_multiplied_in_few_numbers_of_them(dtype: torch.dtype, monkeypatch):
    given = []

    def product(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        given.append(x.numel() // x.shape[-1])
        return plain(x, rows)

    plain = packed_ops._product
    monkeypatch.setattr(packed_ops, "_product", product)
    weight = PackedOps().pack(torch.randn(24, 16, dtype=dtype))
    for num_rows in range(1, 513):
        weight.linear(torch.randn(1, num_rows, 16, dtype=dtype))
    assert len(set(given)) == 160  # of the 512; the longer prompts are, the fewer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [9, 19, 67, 300])
def test_rows_that_fill_up_change_no_bit(dtype: torch.dtype, num_rows: int):
    weight = PackedOps().pack(torch.randn(776, 256, dtype=dtype))
    x = torch.randn(2, num_rows, 256, dtype=dtype)
    assert isinstance(weight, PackedTable)
    assert torch.equal(weight.linear(x), packed_ops._product(x, weight.rows))


@needs_bf16
def test_in_bf16_that_holds_for_a_single_row_too():
    weight = PackedOps().pack(torch.randn(300, 256, dtype=torch.bfloat16))
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    assert torch.equal(weight.linear(x[:1]), weight.linear(x)[:1])


@pytest.mark.slow
@pytest.mark.parametrize(("num_outputs", "width"), [(1, 16), (5, 33), (64, 256), (70, 2048)])
def test_a_float_row_has_the_same_bits_alone_and_among_others(num_outputs: int, width: int):
    random = torch.Generator().manual_seed(width)
    rows = torch.randn(num_outputs, width, generator=random)
    x = torch.randn(FEW_ROWS, width, generator=random)
    table = PackedOps().float_matrix(rows)
    found = table.linear(x)
    assert torch.equal(table.linear(x.view(8, 8, -1)).view(FEW_ROWS, -1), found)
    for count in (1, 3, 9):
        assert torch.equal(table.linear(x[5 : 5 + count]), found[5 : 5 + count])
    exact = x.double() @ rows.double().t()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-7 * width)
    many = table.linear(torch.cat([x, x]))  # a library's product
    torch.testing.assert_close(many[:FEW_ROWS], found, rtol=0, atol=1e-6 * width)


def test_few_compiled_products_are_kept():
    """Beyond the limit the first product is compiled again, says oneDNN's log."""
    program = f"""if True:
        import torch
        from luceasync.models.packed_ops import limit_product_caches

        limit_product_caches()
        rows = torch.ops.mkldnn._reorder_linear_weight(torch.ones(8, 8), 4)
        for num_rows in [*range(2, {MAX_PRODUCTS} + 12), 2]:
            x = torch.ones(num_rows, 8)
            torch.ops.mkldnn._linear_pointwise(x, rows, None, "none", [], "")
    """
    environ = {name: value for name, value in os.environ.items() if name not in CACHE_VARIABLES}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**environ, "ONEDNN_VERBOSE": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    compiled = [line for line in ran.stdout.splitlines() if "create:cache_miss" in line]
    assert sum("mb2ic8oc8" in line for line in compiled) == 2
