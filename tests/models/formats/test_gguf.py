"""Tensors of a GGUF file are read one at a time, and quantised ones slice by slice."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from luceasync.errors import ModelError
from luceasync.models.encodings import HostTransfer, WeightPlacement
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.ops import TorchOps
from luceasync.models.quant.packed import dequantise
from tests.gguf.tiny_files import Tiny, write

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny(types={"ffn_up.weight": "Q5_1", "": "F16"}, num_layers=2, dim=64)
    return write(tiny, tmp_path_factory.mktemp("gguf"))[0]


def placement(piece_bytes: int) -> WeightPlacement:
    cpu, transfer = torch.device("cpu"), HostTransfer(piece_bytes)
    return WeightPlacement(TorchOps(), cpu, torch.float32, transfer)


@pytest.mark.parametrize("slice_bytes", [1, 100, 1 << 20])
def test_slices_are_the_whole(path: Path, slice_bytes: int):
    place = placement(slice_bytes)
    with ModelFiles(path).weights.open() as source:
        parts = source.stored(NAME, (64, 64)).packed(lambda rows: rows, place)
        parts = [(part.shape[0], dequantise(part)) for part in parts]
    row_bytes = 64 // 32 * 24
    assert {num_rows for num_rows, _ in parts[:-1]} <= {max(1, slice_bytes // row_bytes)}
    [stored] = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight"]
    expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    assert torch.equal(torch.cat([numbers for _, numbers in parts]), expected)


def test_plain_tensors_are_as_they_are_stored(path: Path):
    with ModelFiles(path).weights.open() as source:
        tensor = source.read("model.layers.1.mlp.gate_proj.weight", (64, 64))
        norm = source.read("model.norm.weight", (64,))
    assert (tensor.dtype, norm.dtype) == (torch.float16, torch.float32)
    assert norm.shape == (64,)


def test_another_shape_or_an_unknown_name_is_refused(path: Path):
    with ModelFiles(path).weights.open() as source:
        with pytest.raises(ModelError, match=r"has shape \(64, 64\), expected \(64, 32\)"):
            source.stored(NAME, (64, 32))
        with pytest.raises(ModelError, match="there is no tensor for 'x'"):
            source.encoding("x")


def test_a_directory_with_one_file_is_that_file(path: Path):
    assert read_spec(path.parent) == read_spec(path)
    assert ModelFiles(path.parent).weights.paths == [path]
