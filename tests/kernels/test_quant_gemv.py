"""Products with quantised matrices on GPUs equal those of their float32 numbers, with any tile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import quant_dequantize, quant_gemv
from luceasync.kernels.quant_gemv import QuantTile, TiledMatrix
from luceasync.models.quant import gpu
from luceasync.models.quant.checkpoints.fp4 import DIVIDED, NVFP4
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.ggml import ENCODINGS, WHOLE_BYTES
from luceasync.models.quant.packed import dequantise
from luceasync.models.quant.random import random_packed
from luceasync.models.quant.tiles import can_tile, tile

OTHERS = {
    "FP8": QuantEncoding("FP8", 8, 128, 128, "bf16", codes="e4m3"),
    "FP8 by rows": QuantEncoding("FP8", 8, None, None, "fp32", codes="e4m3"),
    "int8": QuantEncoding("int8", 8, None, None, "fp32", codes="int8"),
    "AWQ": QuantEncoding("AWQ", 4, 128, 128, "fp16", minimum="scale", has_small_minimums=True),
    "AWQ, groups of 64": QuantEncoding(
        "AWQ", 4, 64, 64, "fp16", minimum="scale", has_small_minimums=True
    ),
    "bytes": QuantEncoding("bytes", 8, 64, 64, "fp16", minimum="scale", has_small_minimums=True),
    "Q4_K, heads of 128": ENCODINGS["Q4_K"].with_supergroups_within(128),
    "Q5_1, in bytes": WHOLE_BYTES["Q5_1"],
    "NVFP4": NVFP4,
    "NVFP4, divided": DIVIDED,
}
ALL = ENCODINGS | OTHERS
SEGMENTS = (("Q4_K", 304), ("Q6_K", 48))
FEW = ("Q4_K", "Q6_K", "Q8_0")
TILES = (
    QuantTile(1, 2, 2),
    QuantTile(1, 4, 1, num_splits=2),
    QuantTile(2, 2, 1, num_splits=3, prefetch=True),
)


def matrix(
    encoding: QuantEncoding, num_rows: int, num_columns: int, device: torch.device
) -> tuple[TiledMatrix, Tensor]:
    """A random tiled matrix, and its numbers in float32."""
    packed = random_packed(
        encoding, (num_rows, num_columns), torch.Generator(device).manual_seed(1)
    )
    for name, tensor in packed.tensors.items():  # make scales of rows and groups differ
        if tensor.dtype.is_floating_point and name in ("scales", "minimums"):
            tensor.mul_((0.5 + torch.rand(tensor.shape, device=device)).to(tensor.dtype))
    numbers = dequantise(packed)
    return tile(packed), numbers


def rows(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Float32 in the interpreter, bfloat16 on a GPU."""
    x = torch.randn(num_rows, num_columns, device=device)
    return x.bfloat16() if device.type == "cuda" else x


def error(found: Tensor, x: Tensor, numbers: Tensor) -> float:
    exact = x.double() @ numbers.double().t()
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ALL)
def test_numbers_and_rows_are_those_of_the_slow_truth_bit_by_bit(name: str, device) -> None:
    tiled, numbers = matrix(ALL[name], 48, 384, device)
    out = torch.empty(6, 384, device=device)
    quant_dequantize.numbers(tiled, 29, 35, out)  # of two tiles
    assert torch.equal(out, numbers[29:35])
    out = torch.full((32, 384), torch.nan, device=device)
    quant_dequantize.numbers(tiled, 16, 48, out)  # whole tiles
    assert torch.equal(out, numbers[16:])
    ids = torch.tensor([47, 0, 9, 9, 16], device=device)
    assert torch.equal(quant_dequantize.lookup(tiled, ids, torch.float32), numbers[ids])


@pytest.mark.covered(1)
@pytest.mark.parametrize("chosen", [None, *TILES], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_products_are_those_of_float64(name: str, chosen: QuantTile | None, device) -> None:
    check_products(name, chosen, device)


@pytest.mark.parametrize("chosen", TILES, ids=str)
@pytest.mark.parametrize("name", FEW)
def test_products_in_any_tile_are_those_of_float64(name: str, chosen: QuantTile, device) -> None:
    check_products(name, chosen, device)


def check_products(name: str, chosen: QuantTile | None, device: torch.device) -> None:
    tiled, numbers = matrix(ALL[name], 48, 384, device)
    x = rows(3, 384, device)
    found = quant_gemv.linear(x, tiled, dtype=torch.float32, chosen=chosen)
    assert error(found, x, numbers) < 1e-5


@pytest.mark.parametrize("num_rows", [1, 8, 9, 17, 64])
@pytest.mark.parametrize("name", FEW)
def test_any_number_of_rows(name: str, num_rows: int, device) -> None:
    tiled, numbers = matrix(ALL[name], 80, 384, device)
    x = rows(num_rows, 384, device)
    assert error(quant_gemv.linear(x, tiled, dtype=torch.float32), x, numbers) < 1e-5


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("name", FEW)
def test_residual_and_swiglu(name: str, num_splits: int, device) -> None:
    tiled, numbers = matrix(ALL[name], 96, 256, device)
    x = rows(2, 256, device)
    chosen = QuantTile(2, 2, 1, num_splits)
    product = F.linear(x.double(), numbers.double())
    chance = torch.Generator().manual_seed(2)
    residual = torch.randn(2, 96, generator=chance).to(device, x.dtype)
    found = quant_gemv.linear(x, tiled, residual, dtype=torch.float32, chosen=chosen)
    torch.testing.assert_close(found.double(), residual + product, rtol=1e-4, atol=1e-4)
    gate, up = product.chunk(2, -1)
    loose = (
        {"rtol": 1e-2, "atol": 1e-2} if x.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    found = quant_gemv.swiglu(x, tiled, chosen=chosen)
    torch.testing.assert_close(found.double(), F.silu(gate) * up, **loose)


def test_a_row_is_the_same_bits_in_any_company(device) -> None:
    tiled, _ = matrix(ALL["Q4_K"], 64, 512, device)
    x = rows(8, 512, device)
    together = quant_gemv.linear(x, tiled)
    for row in range(8):
        assert torch.equal(quant_gemv.linear(x[row : row + 1], tiled)[0], together[row])


@pytest.mark.parametrize("slice_bytes", [1 << 20, 1 << 17], ids=["whole", "in slices"])
def test_many_rows_are_multiplied_by_the_library(slice_bytes: int, device, monkeypatch) -> None:
    """A product, one added to a residual, and one of stacked segments."""
    monkeypatch.setattr(gpu, "SLICE_BYTES", slice_bytes)
    both = [matrix(ENCODINGS[name], num_rows, 128, device) for name, num_rows in SEGMENTS]
    if device.type == "cpu":  # the interpreter takes long, and another test is about these numbers

        def numbers_of(weight: TiledMatrix, begin: int, end: int, out: Tensor) -> None:
            out.copy_(next(numbers for tiled, numbers in both if tiled is weight)[begin:end])

        monkeypatch.setattr(quant_dequantize, "numbers", numbers_of)
    x = rows(quant_gemv.MAX_ROWS + 3, 128, device)
    segments = [gpu.TiledQuantWeight(tiled, 0, x.dtype) for tiled, _ in both]
    tolerance = 1e-2 if device.type == "cuda" else 1e-5
    for segment, (_, numbers) in zip(segments, both, strict=True):
        assert error(segment.linear(x), x, numbers) < tolerance
        residual = torch.randn(len(x), len(numbers), device=device).to(x.dtype)
        before = residual.clone()
        assert segment.linear_add(x, residual) is residual
        assert error(residual - before.double(), x, numbers) < tolerance
    stacked = torch.cat([numbers for _, numbers in both])
    assert error(gpu.TiledQuantStack(segments).linear(x), x, stacked) < tolerance


def test_partial_blocks_are_refused() -> None:
    assert can_tile(ENCODINGS["Q4_K"], 48, 512)
    assert not can_tile(ENCODINGS["Q4_K"], 40, 512)
    assert not can_tile(ENCODINGS["Q8_0"], 48, 96)
    assert not can_tile(QuantEncoding("odd", 8, 24, 24, "fp16", codes="int8"), 48, 384)


def test_not_a_byte_is_added(device) -> None:
    packed = random_packed(ENCODINGS["Q6_K"], (32, 256), torch.Generator(device))
    places = {tensor.data_ptr() for tensor in packed.tensors.values()}
    tiled = tile(packed)
    found = (tiled.codes, tiled.planes, tiled.scales, tiled.small_scales)
    assert {tensor.data_ptr() for tensor in found} == places
