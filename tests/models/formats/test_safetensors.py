"""Weight files are those of the index, inside the directory, and their headers are checked."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from struct import pack

import pytest
import torch
from safetensors.torch import save_file

from luceasync.errors import ModelError
from luceasync.models.formats.safetensors import SINGLE, SafetensorsWeights, weight_files
from luceasync.models.quant.checkpoints.fp8 import ByteScheme

INDEX = "model.safetensors.index.json"


def write_index(folder: Path, weight_map: dict[str, object]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_each_file_of_the_index_is_there_once(tmp_path: Path):
    write_index(tmp_path, {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]


def test_a_directory_without_weights_says_what_is_looked_for(tmp_path: Path):
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .*\.index\.json exists"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", 7, None])
def test_an_index_stays_inside_its_directory(tmp_path: Path, name: object):
    write_index(tmp_path, {"a": name})
    with pytest.raises(ModelError, match="is not a file name in this directory") as caught:
        weight_files(tmp_path)
    assert INDEX in str(caught.value) and repr(name) in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}'])
def test_an_invalid_index_is_named(tmp_path: Path, content: str):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match="not an index of weight files"):
        weight_files(tmp_path)


SHAPES = {"a.weight": (2, 3), "b": (4,)}


def write_weights(folder: Path, **changed: torch.Tensor) -> Path:
    tensors = {"a.weight": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), **changed}
    save_file(tensors, folder / SINGLE)
    return folder


def test_what_is_stored_as_it_is_wanted_is_fine(tmp_path: Path):
    SafetensorsWeights(write_weights(tmp_path, more=torch.ones(5)), None).check(SHAPES)


@pytest.mark.parametrize(
    ("name", "stored", "words"),
    [
        ("b", torch.ones(5), r"'b' has shape \(5,\), expected \(4,\)"),
        ("b", torch.ones(4, dtype=torch.int8), "'b' is stored as I8; F64, F32, F16, BF16 are"),
    ],
)
def test_another_shape_or_dtype_is_refused_before_loading(
    tmp_path: Path, name: str, stored: torch.Tensor, words: str
):
    with pytest.raises(ModelError, match=words):
        SafetensorsWeights(write_weights(tmp_path, **{name: stored}), None).check(SHAPES)


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight"),
        *("score.weight", "model.layers.9.mlp.up_proj.weight", "lm_head.bias", "a.pre_quant_scale"),
        *("a.weight_scale", "v_head.summary.weight", "self_attn.k_scale"),
    ],
)
def test_a_tensor_that_no_layer_uses_is_refused(tmp_path: Path, name: str):
    weights = SafetensorsWeights(write_weights(tmp_path, **{name: torch.ones(5)}), None)
    weights.check(SHAPES)
    with pytest.raises(ModelError, match=f"no layer uses the tensor '{name}'"):
        weights.check_unused(SHAPES)


def test_a_tensor_that_changes_nothing_is_passed_over(tmp_path: Path):
    ones = ("mtp.fc.weight", "model.visual.x", "model.layers.0.self_attn.rotary_emb.inv_freq")
    others = {name: torch.ones(5) for name in ones} | {"a.bias": torch.zeros(2)}
    SafetensorsWeights(write_weights(tmp_path, **others), None).check_unused(SHAPES)


def test_what_stands_beside_a_quantised_matrix_is_no_part_of_another_layer(tmp_path: Path):
    scheme = ByteScheme("FP8")
    tensors = {
        "a.weight": torch.ones(2, 3).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(1),
    }
    more = {"a.input_scale": torch.ones(1), "attn.k_scale": torch.ones(1)}
    SafetensorsWeights(write_weights(tmp_path, **tensors, **more), scheme).check_unused(SHAPES)
    write_weights(tmp_path, **tensors, **{"a.pre_quant_scale": torch.ones(3)})
    with pytest.raises(ModelError, match=r"no layer uses the tensor 'a\.pre_quant_scale'"):
        SafetensorsWeights(tmp_path, scheme).check_unused(SHAPES)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, True),
        ({"head.weight": torch.ones(2, 3)}, True),
        ({"head.weight": torch.tensor([[1.0, 1, 1], [1, 1, 2]])}, False),
        ({"head.weight": torch.ones(2, 3).half()}, False),
        ({"head.qweight": torch.ones(2, 3)}, False),
    ],
)
def test_a_head_is_tied_if_it_is_the_embedding(
    tmp_path: Path, tensors: dict[str, torch.Tensor], expected: bool
):
    weights = SafetensorsWeights(write_weights(tmp_path, **tensors), None)
    assert weights.is_tied("head.weight", "a.weight") is expected


def test_a_tensor_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"the weights have no tensor 'c\.bias'"):
        SafetensorsWeights(write_weights(tmp_path), None).check(SHAPES | {"c.bias": (1,)})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_told(tmp_path: Path, number: float):
    write_weights(tmp_path, b=torch.tensor([1, number, 2, 3], dtype=torch.bfloat16))
    with SafetensorsWeights(tmp_path, None).open() as source:
        assert source.read("a.weight", (2, 3)).shape == (2, 3)
        words = f"{re.escape(str(tmp_path))}: 'b' has a number that is not finite"
        with pytest.raises(ModelError, match=words):
            source.read("b", (4,))


@pytest.mark.parametrize("num_bytes", [1, 9, 32])
def test_a_cut_file_says_how_much_is_there(tmp_path: Path, num_bytes: int):
    path = write_weights(tmp_path) / SINGLE
    whole = path.read_bytes()
    path.write_bytes(whole[:-num_bytes])
    words = f"truncated: it has {len(whole) - num_bytes} bytes, expected {len(whole)}"
    with pytest.raises(ModelError, match=words):
        SafetensorsWeights(tmp_path, None).check(SHAPES)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"b": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 16]}}',
        b'{"b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1e999]}}',
        b'{"b": {"dtype": "F32", "shape": [4], "data_offsets": []}}',
        b'{"b": {"dtype": "F32", "shape": [4]}}',
        b'{"b": 3}',
        b"7",
        b"\xff",
    ],
)
def test_a_header_of_anything_is_refused_in_words(tmp_path: Path, header: bytes):
    (tmp_path / SINGLE).write_bytes(pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        SafetensorsWeights(tmp_path, None).check(SHAPES)


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(ModelError, match="not a regular file"):
        SafetensorsWeights(tmp_path, None).check(SHAPES)
