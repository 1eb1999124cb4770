"""Random quantised numbers have the size of plain ones, and follow from the seed."""

from __future__ import annotations

import pytest
import torch

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.models.encodings import DenseEncoding, WeightPlacement
from luceasync.models.files import read_spec
from luceasync.models.layer_reader import TensorPart
from luceasync.models.loader import RandomSource, TensorReader
from luceasync.models.ops import TorchOps
from luceasync.models.quant.checkpoints.fp4 import DIVIDED, NVFP4
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.ggml import ENCODINGS

OTHERS = {
    "FP8": QuantEncoding("FP8", 8, 128, 128, "bf16", codes="e4m3"),
    "int8": QuantEncoding("int8", 8, None, None, "fp32", codes="int8"),
    "AWQ": QuantEncoding("AWQ", 4, 128, 128, "fp16", minimum="scale", has_small_minimums=True),
    "NVFP4": NVFP4,
    "divided": DIVIDED,
}
SHAPE = (600, 512)


def rows_of(encoding: QuantEncoding, seed: int = 0) -> torch.Tensor:
    source = RandomSource(torch.float32, torch.device("cpu"), seed, lambda name: encoding)
    place = WeightPlacement(TorchOps(), torch.device("cpu"), torch.float32)
    table = TensorReader(source, read_spec(BUNDLED_MODEL_DIR), place).table("x", SHAPE)
    return table.lookup(torch.arange(SHAPE[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ENCODINGS, *OTHERS])
def test_numbers_are_about_as_large_as_plain_ones(name: str):
    rows = rows_of((ENCODINGS | OTHERS)[name])
    assert torch.isfinite(rows).all()
    assert 0.3 < rows.std() * SHAPE[1] ** 0.5 < 3
    assert torch.equal(rows, rows_of((ENCODINGS | OTHERS)[name]))
    assert not torch.equal(rows, rows_of((ENCODINGS | OTHERS)[name], seed=1))


def test_parts_of_matrices_and_plain_ones_beside_them():
    source = RandomSource(
        torch.float32,
        torch.device("cpu"),
        encoding_of=lambda name: DenseEncoding() if name == "b" else ENCODINGS["Q4_K"],
    )
    place = WeightPlacement(TorchOps(), torch.device("cpu"), torch.float32)
    parts = [TensorPart("a", lambda rows: rows[::2], divisor=2), TensorPart("b"), TensorPart("c")]
    weight = TensorReader(source, read_spec(BUNDLED_MODEL_DIR), place).stacked(
        parts, dict.fromkeys("abc", SHAPE)
    )
    assert weight.linear(torch.randn(2, SHAPE[1])).shape == (2, 300 + 600 + 600)
