"""Compiled products with quantised matrices, for each instruction set of this machine: dequantised
numbers equal dequantise bit by bit, sums match float64, and rows do not depend on each other.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from luceasync.cyext.quantised import KERNELS
from luceasync.models.ops import TorchOps
from luceasync.models.packed_ops import PackedOps, can_pack
from luceasync.models.quant.cpu import CompiledQuantWeight, can_multiply
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.ggml import ENCODINGS, FLOAT_4
from luceasync.models.quant.packed import Packed, dequantise
from luceasync.models.quant.random import RandomModule

pytestmark = pytest.mark.skipif(not KERNELS, reason="this machine has no kernels")

ELSEWHERE = (
    QuantEncoding("AWQ", 4, 128, 128, "fp16", minimum="scale", has_small_minimums=True),
    QuantEncoding("AWQ by 48", 4, 48, 48, "bf16", minimum="scale", has_small_minimums=True),
    QuantEncoding("GPTQ of 8 bits", 8, 128, 128, "fp16", minimum="scale", has_small_minimums=True),
    QuantEncoding("uint8", 8, 32, 32, "fp32", minimum="own"),
    QuantEncoding("FP8", 8, 128, 128, "fp32", codes="e4m3"),
    QuantEncoding("int8 by rows", 8, None, None, "bf16", codes="int8"),
    QuantEncoding("NVFP4", 4, 16, None, "fp32", "e4m3", table=FLOAT_4, divides=True),
)
ALL = {layout.name: layout for layout in (*ENCODINGS.values(), *ELSEWHERE)}


def matrix(layout: QuantEncoding, num_rows: int, num_columns: int) -> Packed:
    """A random matrix whose D and M differ."""
    generator = torch.Generator().manual_seed(num_rows)
    module = RandomModule("w", layout, (num_rows, num_columns), generator)
    [packed] = module.packed(lambda rows: rows)
    for name in {"scales", "minimums"} & packed.tensors.keys():
        reals = packed.tensors[name]
        if layout.scale == "e8m0":
            reals += torch.randint(0, 3, reals.shape, generator=generator).byte()
        else:
            reals *= 0.5 + torch.rand(reals.shape, generator=generator).to(reals.dtype)
    return packed


def compiled(packed: Packed, kernel: str) -> CompiledQuantWeight:
    own = {name: tensor.clone() for name, tensor in packed.tensors.items()}
    return CompiledQuantWeight(Packed(packed.layout, **own), torch.float32, kernel)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ALL)
def test_products_are_those_of_float64_and_rows_those_of_dequantise(name: str, kernel: str):
    for num_rows, num_columns in ((37, 512), (5, 256), (16, 768)):
        packed = matrix(ALL[name], num_rows, num_columns)
        numbers, own = dequantise(packed), compiled(packed, kernel)
        assert torch.equal(own.lookup(torch.arange(num_rows)), numbers)
        assert own.num_bytes == packed.num_bytes
        x = torch.randn(3, 7, num_columns)
        assert relative_error(own.linear(x), x.double() @ numbers.double().t()) < 1e-6
        half = x.bfloat16()
        exact = half.double() @ numbers.double().t()
        assert own.linear(half).dtype == torch.bfloat16
        assert relative_error(own.linear(half), exact) < 3e-3  # rounding alone is 1.7e-3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "IQ4_XS"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_those_beside_it(
    name: str, kernel: str, dtype: torch.dtype
):
    own = compiled(matrix(ALL[name], 35, 256), kernel)
    x = torch.randn(259, 256).to(dtype)  # more rows than a tile takes at once
    together = own.linear(x)
    for num_rows in (1, 2, 5, 130):
        assert torch.equal(torch.cat([own.linear(part) for part in x.split(num_rows)]), together)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_fused_is_rounded_once(kernel: str, dtype: torch.dtype):
    packed = matrix(ALL["Q4_K"], 96, 256)
    numbers, own = dequantise(packed).double(), compiled(packed, kernel)
    x, residual = torch.randn(2, 5, 256).to(dtype), torch.randn(2, 5, 96).to(dtype)
    exact = x.double() @ numbers.t()
    assert torch.allclose(
        own.linear_add(x, residual), (residual.double() + exact).to(dtype), rtol=1e-2, atol=1e-5
    )
    gate, up = exact.chunk(2, -1)
    rounded = (torch.nn.functional.silu(gate) * up).to(dtype)
    found = own.swiglu(x)
    assert found.shape == rounded.shape
    assert relative_error(found, rounded.double()) < (1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_halves_that_are_not_whole_tiles_are_gated_too(kernel: str):
    packed = matrix(ALL["Q8_0"], 40, 64)
    x = torch.randn(3, 64)
    found = compiled(packed, kernel).swiglu(x)
    assert relative_error(found, TorchOps().quantised(packed, x.dtype).swiglu(x).double()) < 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_gates_that_are_large_saturate(kernel: str):
    packed = matrix(ALL["Q8_0"], 32, 32)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)) * 1e4
    expected = TorchOps().quantised(packed, x.dtype).swiglu(x)
    torch.testing.assert_close(compiled(packed, kernel).swiglu(x), expected, rtol=1e-4, atol=1.0)


@pytest.mark.skipif(not can_pack(), reason="this build of torch has no oneDNN")
def test_layouts_that_no_kernel_takes_are_multiplied_in_torch():
    layout = ALL["int8 by rows"]
    assert can_multiply(layout, 64)
    assert not can_multiply(layout, 47)
    packed, x = matrix(layout, 5, 47), torch.randn(2, 47)
    exact = x.double() @ dequantise(packed).double().t()
    assert relative_error(PackedOps().quantised(packed, x.dtype).linear(x), exact) < 1e-6


def test_an_unknown_kernel_and_a_row_that_is_not_there_are_refused():
    own = compiled(matrix(ALL["Q4_0"], 5, 64), KERNELS[-1])
    with pytest.raises(IndexError, match="row 5 of 5"):
        own.lookup(torch.tensor([1, 5]))
    with pytest.raises(ValueError, match="no kernel 'sse' on this machine"):
        compiled(matrix(ALL["Q4_0"], 5, 64), "sse").linear(torch.ones(1, 64))
