"""Tensors of a GGUF file are read one at a time, and quantised ones slice by slice."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from luceasync.errors import ModelError
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.formats import gguf as own_format
from luceasync.models.quant.packed import dequantise
from tests.gguf.tiny_files import Tiny, write

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny(types={"ffn_up.weight": "Q5_1", "": "F16"}, num_layers=2, dim=64)
    return write(tiny, tmp_path_factory.mktemp("gguf"))[0]


@pytest.mark.parametrize("slice_bytes", [1, 100, 1 << 20])
def test_slices_are_the_whole(path: Path, slice_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_format, "SLICE_BYTES", slice_bytes)
    with ModelFiles(path).weights.open() as source:
        parts = list(source.read(NAME, (64, 64)).packed(lambda rows: rows))
    row_bytes = 64 // 32 * 24
    assert {part.shape[0] for part in parts[:-1]} <= {max(1, slice_bytes // row_bytes)}
    [stored] = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight"]
    expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    assert torch.equal(torch.cat([dequantise(part) for part in parts]), expected)


def test_plain_tensors_are_as_they_are_stored(path: Path):
    with ModelFiles(path).weights.open() as source:
        tensor = source.read("model.layers.1.mlp.gate_proj.weight", (64, 64))
        norm = source.read("model.norm.weight", (64,))
    assert (tensor.dtype, norm.dtype) == (torch.float16, torch.float32)
    assert norm.shape == (64,)


def test_another_shape_or_an_unknown_name_is_refused(path: Path):
    with ModelFiles(path).weights.open() as source:
        with pytest.raises(ModelError, match=r"has shape \(64, 64\), expected \(64, 32\)"):
            source.read(NAME, (64, 32))
        with pytest.raises(ModelError, match="there is no tensor for 'x'"):
            source.encoding("x")


def test_a_directory_with_one_file_is_that_file(path: Path):
    assert read_spec(path.parent) == read_spec(path)
    assert ModelFiles(path.parent).weights.paths == [path]
