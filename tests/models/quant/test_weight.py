"""Products with quantised matrices are as exact as float32 sums, and rows do not depend on each
other.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from luceasync.models.ops import TorchOps
from luceasync.models.packed_ops import PackedOps
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.ggml import ENCODINGS, pack
from luceasync.models.quant.packed import Packed, dequantise
from luceasync.models.quant.torch_weight import SLICE_NUMBERS
from luceasync.models.weights import EmbeddingTable, StackedWeight
from tests.gguf.blocks import TYPES, random_blocks
from tests.half_precision import needs_bf16

NAMES = ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4"]


def matrix(name: str, num_rows: int = 300, num_columns: int = 512) -> Packed:
    stored = random_blocks(name, num_rows, num_columns, scale=2**-7)
    blocks = num_columns // TYPES[name].block_items
    return pack(ENCODINGS[name], torch.from_numpy(stored).unflatten(1, (blocks, -1)))


def weight(
    name: str, ops: TorchOps, dtype: torch.dtype = torch.float32
) -> tuple[EmbeddingTable, Tensor]:
    """A weight, and its numbers in float64."""
    packed = matrix(name)
    numbers = dequantise(packed).double()
    return ops.quantised(packed, dtype), numbers


@pytest.fixture(params=[TorchOps, PackedOps])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return request.param()


@pytest.mark.parametrize("num_rows", [1, 5, 64, 200])
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_float64(ops: TorchOps, name: str, num_rows: int):
    own, numbers = weight(name, ops)
    x = torch.randn(2, num_rows, 512)
    exact = x.double() @ numbers.t()
    error = (own.linear(x).double() - exact).norm() / exact.norm()
    assert error < 1e-6


def test_half_precision_rows_are_rounded_once(ops: TorchOps):
    own, numbers = weight("Q4_K", ops, torch.bfloat16)
    x = torch.randn(3, 512).bfloat16()
    exact = (x.double() @ numbers.t()).bfloat16().double()
    found = own.linear(x)
    assert found.dtype == torch.bfloat16
    assert (found.double() == exact).double().mean() > 0.99
    assert (found.double() - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_those_beside_it(name: str, dtype: torch.dtype):
    own, _ = weight(name, PackedOps(), dtype)
    x = torch.randn(97, 512).to(dtype)
    together = own.linear(x)
    for num_rows in (1, 2, 3, 4, 7, 16, 33):
        parts = [own.linear(part) for part in x.split(num_rows)]
        assert torch.equal(torch.cat(parts), together)


def test_residual_swiglu_and_lookup(ops: TorchOps):
    own, numbers = weight("Q6_K", ops)
    x, residual = torch.randn(4, 512), torch.randn(4, 300)
    torch.testing.assert_close(own.linear_add(x, residual.clone()), residual + own.linear(x))
    gate, up = own.linear(x).chunk(2, -1)
    torch.testing.assert_close(own.swiglu(x), torch.nn.functional.silu(gate) * up)
    ids = torch.tensor([[3, 299], [0, 3]])
    assert torch.equal(own.lookup(ids), numbers.float()[ids])


@needs_bf16
def test_products_of_half_precision_rows_may_be_asked_for_in_float32(ops: TorchOps):
    own, _ = weight("Q6_K", ops, torch.bfloat16)
    stack, x = StackedWeight([own, own]), torch.randn(2, 2, 512).bfloat16()
    for each in (own, stack, ops.pack(torch.randn(60, 512).bfloat16())):
        plain = each.linear(x)
        out = torch.full(plain.shape, torch.nan)
        assert torch.equal(each.linear_float(x), plain.float())
        assert each.linear_float(x, out=out) is out and torch.equal(out, plain.float())


def test_segments_that_are_stored_unlike_are_one_weight(ops: TorchOps):
    segments = [weight("Q4_K", ops), weight("Q6_K", ops)]
    dense = torch.randn(60, 512)
    numbers = torch.cat([*(part for _, part in segments), dense.double()])
    own = StackedWeight([*(part for part, _ in segments), ops.pack(dense.clone())])
    x = torch.randn(5, 512)
    exact = x.double() @ numbers.t()
    assert own.linear(x).shape == exact.shape
    assert (own.linear(x).double() - exact).norm() < 1e-6 * exact.norm()


def test_no_more_than_a_slice_is_float32_at_once(monkeypatch: pytest.MonkeyPatch):
    sizes = []

    def seen(packed: Packed, table: Tensor | None) -> Tensor:
        sizes.append(packed.shape[0] * packed.shape[1])
        return dequantise(packed, table)

    monkeypatch.setattr("luceasync.models.quant.torch_weight.dequantise", seen)
    own = TorchOps().quantised(matrix("Q4_0", 9000, 512), torch.float32)
    own.linear(torch.randn(1, 512))
    assert sum(sizes) == 9000 * 512
    assert max(sizes) <= SLICE_NUMBERS


def test_columns_that_no_layout_takes_are_refused():
    assert "multiple of 32" in ENCODINGS["Q4_0"].fault_of(48)
    assert not QuantEncoding("int8", 8, None, None, "fp32", codes="int8").fault_of(47)
