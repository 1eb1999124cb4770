"""Numbers written by compressed-tensors are those that the library reads back."""

from __future__ import annotations

import pytest
import torch

from luceasync.models.encodings import WeightPlacement
from luceasync.models.ops import TorchOps
from luceasync.models.quant.checkpoints.module import ModuleTensors
from luceasync.models.quant.packed import dequantise
from tests.models.quant.checkpoints.test_schemes import CASES, MODULE, find

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

PLACE = WeightPlacement(TorchOps(), torch.device("cpu"), torch.float32)


def ours(case: str) -> torch.Tensor:
    config, (tensors, _) = CASES[case]
    found, named = find(config, tensors)
    assert found is not None
    stored = ModuleTensors(MODULE, found, {key: named[own] for key, own in found.names.items()})
    [packed] = stored.packed(lambda rows: rows, PLACE)
    return dequantise(packed)


def arguments(case: str) -> QuantizationArgs:
    weights = CASES[case][0]["config_groups"]["group_0"]["weights"]
    if weights["strategy"] != "group":
        weights = {name: value for name, value in weights.items() if name != "group_size"}
    return QuantizationArgs(**weights)


@pytest.mark.parametrize(
    "case",
    [
        "pack-quantized",
        "pack-quantized, zero points",
        "pack-quantized, rows of 8 bits",
        "float-quantized",
        "int-quantized",
        "mxfp4",
    ],
)
def test_numbers_are_those_of_its_own_way_back(case: str):
    config, (tensors, _) = CASES[case]
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments(case))
    given = dict(tensors)
    if given["weight_scale"].dtype == torch.bfloat16:  # otherwise it would round to that dtype
        given["weight_scale"] = given["weight_scale"].float()
    found = BaseCompressor.get_value_from_registry(config["format"]).decompress(given, scheme)
    assert torch.equal(ours(case), found["weight"].float())


def test_nvfp4_numbers_are_those_of_its_arithmetic_in_float32():
    tensors = CASES["nvfp4"][1][0]
    rows, half = tensors["weight_packed"].shape
    codes = unpack_fp4_from_uint8(tensors["weight_packed"], rows, 2 * half, torch.float32)
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    found = dequantize(
        codes,
        tensors["weight_scale"].float(),
        args=args,
        global_scale=tensors["weight_global_scale"],
        dtype=torch.float32,
    )
    assert torch.equal(ours("nvfp4"), found)
