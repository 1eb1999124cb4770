"""Quantised modules of checkpoints have the numbers that their format defines, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from luceasync.errors import ModelError
from luceasync.models.encodings import WeightPlacement
from luceasync.models.ops import TorchOps
from luceasync.models.precision import Precision
from luceasync.models.quant.checkpoints.module import ModuleTensors, TensorInfo
from luceasync.models.quant.checkpoints.scheme import scheme_of
from luceasync.models.quant.packed import dequantise
from tests.reference import quantised as truth

PLACE = WeightPlacement(TorchOps(), torch.device("cpu"), torch.float32)

DTYPES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
MODULE = "model.layers.0.mlp.up_proj"


def compressed(storage: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CASES = {
    "fp8 blocks": (FP8_BLOCKS, truth.fp8_blocks(200, 300, 128, torch.float32)),
    "fp8 blocks, bf16": (FP8_BLOCKS, truth.fp8_blocks(128, 256, 128, torch.bfloat16)),
    "fp8 rows": ({"quant_method": "fbgemm_fp8"}, truth.fp8_rows(7, 50)),
    "fp8 matrix": ({"quant_method": "fp8"}, truth.fp8_matrix(7, 50)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, truth.awq(24, 192, 64)),
    "awq, one group": ({"quant_method": "awq", "bits": 4, "group_size": -1}, truth.awq(8, 96, 96)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, truth.gptq(24, 192, 32)),
    "gptq, 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": False},
        truth.gptq(12, 128, 64, 8),
    ),
    "pack-quantized": (compressed("pack-quantized", **INT4), truth.pack_quantized(13, 192, 64)),
    "pack-quantized, zero points": (
        compressed("pack-quantized", **INT4 | {"symmetric": False}),
        truth.pack_quantized(13, 192, 64, zeros=True),
    ),
    "pack-quantized, rows of 8 bits": (
        compressed("pack-quantized", **INT4 | {"num_bits": 8, "strategy": "channel"}),
        truth.pack_quantized(9, 64, 64, 8),
    ),
    "float-quantized": (compressed("float-quantized", **FP8), truth.fp8_rows(5, 33)),
    "int-quantized": (compressed("int-quantized", **FP8 | {"type": "int"}), truth.int8_rows(5, 33)),
    "mxfp4": (compressed("mxfp4-pack-quantized", **FP4), truth.mxfp4(11, 96)),
    "nvfp4": (compressed("nvfp4-pack-quantized", **FP4), truth.nvfp4(11, 96, divided=True)),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        truth.nvfp4(11, 96, divided=False),
    ),
}


def find(config: dict[str, Any], tensors: dict[str, torch.Tensor]):
    """(the matrix that was found, the tensors by full name)."""
    named = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    infos = {name: TensorInfo(DTYPES[t.dtype], tuple(t.shape)) for name, t in named.items()}
    scheme = scheme_of({"quantization_config": config})
    assert scheme is not None
    return scheme.find(MODULE, infos), named


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_format(case: str):
    config, (tensors, numbers) = CASES[case]
    found, named = find(config, tensors)
    assert found is not None
    assert found.shape == tuple(numbers.shape)
    stored = ModuleTensors(MODULE, found, {key: named[own] for key, own in found.names.items()})
    [packed] = stored.packed(lambda rows: rows, PLACE)
    assert torch.equal(dequantise(packed), numbers)
    assert packed.num_bytes == found.encoding.num_bytes(found.shape, Precision.of("bf16"))


@pytest.mark.parametrize("case", CASES)
def test_rows_are_taken_with_what_belongs_to_them(case: str):
    config, (tensors, numbers) = CASES[case]
    found, named = find(config, tensors)
    stored = ModuleTensors(MODULE, found, {key: named[own] for key, own in found.names.items()})
    [packed] = stored.packed(lambda rows: rows[1:6:2], PLACE)
    assert torch.equal(dequantise(packed), numbers[1:6:2])


@pytest.mark.parametrize("case", CASES)
def test_what_is_stored_plainly_is_left_alone(case: str):
    found, _ = find(CASES[case][0], {"weight": torch.zeros(4, 64, dtype=torch.bfloat16)})
    assert found is None


def test_a_checkpoint_without_a_configuration_is_plain():
    assert scheme_of({"model_type": "qwen3"}) is None


def test_the_configuration_of_a_wrapper_counts_and_so_does_that_of_its_part():
    config = CASES["awq"][0]
    assert scheme_of({"text_config": {}, "quantization_config": config}) is not None
    assert scheme_of({"text_config": {"quantization_config": config}}) is not None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method = 'bitsandbytes' is not supported; expected awq or",
        ),
        ({"quant_method": ["awq"]}, "quant_method = ['awq'] is not supported"),
        ("awq", "quantization_config = 'awq': expected a JSON object"),
        (
            {"quant_method": "awq", "bits": 3, "group_size": 64},
            ".bits = 3 is not supported; expected 4",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 7}, ".group_size = 7 is not supported"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
            ".version = 'gemv' is not supported; expected 'gemm' or 'GEMM'",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
            ".desc_act = True is not supported; expected False",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, ".quant_algo = 'W4A8' is not"),
        (compressed("marlin-24", **INT4), ".format = 'marlin-24' is not supported"),
        (compressed("pack-quantized", **INT4 | {"num_bits": 2}), ".num_bits = 2 is not supported"),
        (
            compressed("pack-quantized", **INT4) | {"transform_config": {"a": {"b": 1}}},
            ".transform_config = {'a': {'b': 1}} is not supported; expected none",
        ),
        ({"quant_method": "compressed-tensors"}, ".config_groups = None is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ".weight_block_size = [128] is not"),
    ],
)
def test_what_is_not_read_is_refused_in_words(config: Any, words: str):
    with pytest.raises(ModelError) as caught:
        scheme_of({"quantization_config": config})
    assert words in str(caught.value)


def gptq_numbers(bits: int, zero: int, **fields: Any) -> torch.Tensor:
    """The numbers of a matrix whose stored zero points are all `zero`."""
    tensors, _ = truth.gptq(24, 192, 64, bits)
    word = int.from_bytes(bytes([zero if bits == 8 else zero << 4 | zero]) * 4, signed=True)
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], word)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 64, **fields}
    found, named = find(config, tensors)
    stored = ModuleTensors(MODULE, found, {key: named[own] for key, own in found.names.items()})
    [packed] = stored.packed(lambda rows: rows, PLACE)
    return dequantise(packed)


@pytest.mark.parametrize("fields", [{}, {"sym": True}, {"sym": False}])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_gptq_checkpoint_that_does_not_name_its_version_shows_it(bits: int, fields):
    middle = 1 << (bits - 1)
    expected = gptq_numbers(bits, middle, checkpoint_format="gptq_v2")
    assert torch.equal(gptq_numbers(bits, middle, **fields), expected)
    assert torch.equal(gptq_numbers(bits, middle - 1, **fields), expected)
    assert torch.equal(gptq_numbers(bits, middle, **fields, format="gptq_v2"), expected)
    assert torch.equal(gptq_numbers(bits, middle - 1, checkpoint_format="gptq"), expected)


@pytest.mark.parametrize(
    ("zero", "fields"), [(8, {"checkpoint_format": "gptq"}), (7, {"format": "gptq_v2"}), (5, {})]
)
def test_symmetric_matrices_have_their_zero_in_the_middle(zero: int, fields):
    with pytest.raises(ModelError, match=f"qzeros: stored zero points from {zero} to {zero}; exp"):
        gptq_numbers(4, zero, sym=True, **fields)


def test_columns_in_another_order_are_refused():
    config, (tensors, _) = CASES["gptq"]
    found, named = find(config, tensors | {"g_idx": tensors["g_idx"].flip(0)})
    stored = ModuleTensors(MODULE, found, {key: named[own] for key, own in found.names.items()})
    with pytest.raises(ModelError, match="g_idx: columns in the order of their activations"):
        list(stored.packed(lambda rows: rows, PLACE))
    config, (tensors, _) = CASES["pack-quantized"]
    with pytest.raises(ModelError, match="columns in the order of activations"):
        find(config, tensors | {"weight_g_idx": torch.zeros(192, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (
            "fp8 rows",
            {"weight_scale": torch.ones(3, 2)},
            "shape (3, 2) for a matrix of (7, 50)",
        ),
        ("awq", {"scales": torch.ones(3, 23, dtype=torch.float16)}, "expected (3, 24)"),
        ("awq", {"qzeros": torch.ones(3, 3)}, "is stored as F32; expected I32"),
        ("nvfp4", {"weight_global_scale": None}, "have no tensor"),
        ("nvfp4", {"weight_global_scale": torch.ones(3)}, "shape (3,); expected one number"),
        (
            "nvfp4",
            {"weight_packed": torch.ones(9, dtype=torch.uint8)},
            "has shape (9,); expected two dimensions",
        ),
        ("mxfp4", {"weight_packed": torch.ones(11, 48)}, "is stored as F32; expected U8"),
        ("mxfp4", {"weight_scale": torch.ones(11, 2, dtype=torch.uint8)}, "expected (11, 3)"),
        ("fp8 matrix", {"weight_scale": None}, "is stored as F8_E4M3, and has no scale"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(case: str, change, words: str):
    config, (tensors, _) = CASES[case]
    changed = {name: t for name, t in (tensors | change).items() if t is not None}
    with pytest.raises(ModelError) as caught:
        find(config, changed)
    assert words in str(caught.value)
