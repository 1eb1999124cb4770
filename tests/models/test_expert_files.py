"""Experts in files: a tensor for each or one of all, in slices; what is missing, there twice or in
another encoding is told by its name.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.models.encodings import StoredRows, WeightPlacement
from luceasync.models.files import ModelFiles, parse_spec
from luceasync.models.loader import TensorReader
from luceasync.models.ops import TorchOps
from tests.gguf.tiny_files import Tiny, write

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
EXPERTS = "model.layers.1.mlp.experts"


def split_up(folder: Path) -> dict[str, Tensor]:
    """Write a model with a tensor for each expert; its tensors."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random = torch.Generator().manual_seed(1)
    shapes = parse_spec(CONFIG).shapes()
    tensors = {name: torch.randn(*shape, generator=random) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def fused(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write the same model with one tensor for all experts; its tensors."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        kinds = {
            kind: torch.stack([tensors[f"{prefix}.{e}.{kind}_proj.weight"] for e in range(5)])
            for kind in ("gate", "up", "down")
        }
        found[f"{prefix}.gate_up_proj"] = torch.cat([kinds["gate"], kinds["up"]], 1)
        found[f"{prefix}.down_proj"] = kinds["down"]
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(found, folder / "model.safetensors")
    return found


def checked(folder: Path) -> ModelFiles:
    """The model's files, with all headers checked as at a start."""
    files = ModelFiles(folder)
    files.weights.check(files.spec.shapes())
    files.weights.check_unused(files.spec.shapes())
    return files


def answer(folder: Path) -> Tensor:
    """What the feed-forward network of layer 1 makes of some rows."""
    files = checked(folder)
    place = WeightPlacement(TorchOps(), torch.device("cpu"), torch.float32)
    with files.weights.open() as source:
        layer = TensorReader(source, files.spec, place).layer(1)
    place.findings.raise_fault()
    x = torch.randn(1, 7, files.spec.hidden_size, generator=torch.Generator().manual_seed(2))
    return layer.feed_forward.forward(x)


def test_one_tensor_of_all_experts_says_what_one_for_each_says(tmp_path: Path):
    for name in ("split", "fused"):
        (tmp_path / name).mkdir()
    tensors = split_up(tmp_path / "split")
    fused(tmp_path / "fused", tensors)
    assert torch.equal(answer(tmp_path / "split"), answer(tmp_path / "fused"))


def test_of_one_tensor_for_all_no_more_is_read_at_once_than_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fused(tmp_path, split_up(tmp_path))
    most, read = 0, StoredRows.read

    def watched(self: StoredRows, begin: int, end: int, out: Tensor) -> None:
        nonlocal most
        most = max(most, out.nbytes)
        read(self, begin, end, out)

    monkeypatch.setattr(StoredRows, "read", watched)
    monkeypatch.setattr("luceasync.models.encodings.HostTransfer.__init__.__defaults__", (512,))
    answer(tmp_path)
    assert 0 < most <= 512


def test_a_missing_expert_is_named(tmp_path: Path):
    tensors = split_up(tmp_path)
    del tensors[f"{EXPERTS}.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(f"no tensor '{EXPERTS}.3.up_proj.weight'")):
        checked(tmp_path)


@pytest.mark.parametrize("num_experts", [4, 6])
def test_one_tensor_of_too_few_or_too_many_experts_is_named(tmp_path: Path, num_experts: int):
    tensors = fused(tmp_path, split_up(tmp_path))
    tensors[f"{EXPERTS}.down_proj"] = torch.ones(num_experts, 32, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    words = f"'{EXPERTS}.down_proj' has shape ({num_experts}, 32, 16), expected (5, 32, 16)"
    with pytest.raises(ModelError, match=re.escape(words)):
        checked(tmp_path)


def test_an_expert_that_is_there_twice_is_named(tmp_path: Path):
    tensors = split_up(tmp_path)
    twice = fused(tmp_path, tensors)
    save_file(twice | tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no layer uses the tensor '.*mlp\.experts\.down_proj'"):
        checked(tmp_path)
    name = f"{EXPERTS}.2.gate_proj.weight"
    parts = {"a.safetensors": tensors, "b.safetensors": {name: tensors[name]}}
    for file, part in parts.items():
        save_file(part, tmp_path / file)
    index = {"weight_map": {file: file for file in parts}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    words = f"b.safetensors: '{name}' is also in a.safetensors"
    with pytest.raises(ModelError, match=re.escape(words)):
        checked(tmp_path)


def test_experts_of_one_layer_have_one_encoding(tmp_path: Path):
    """Of another layer, or another of the three matrices, they may have another."""
    mixed = {
        "blk.0.ffn_gate_exps.weight": "Q8_0",
        "blk.0.ffn_up_exps.weight": "Q8_0",
        "ffn_down_exps.weight": "Q5_0",
        "blk.1.ffn_up_exps.weight": "Q5_0",
        "": "Q4_0",
    }
    sizes = {"num_layers": 2, "dim": 64}
    fine = {name: kind for name, kind in mixed.items() if not name.startswith("blk.1")}
    for name in ("fine", "mixed"):
        (tmp_path / name).mkdir()
    path, plain = write(Tiny("qwen3_moe", types=fine, **sizes), tmp_path / "fine")
    torch.testing.assert_close(answer(path), answer(plain), rtol=0, atol=1e-5)
    path, _ = write(Tiny("qwen3_moe", types=mixed, **sizes), tmp_path / "mixed")
    words = (
        "'model.layers.1.mlp.experts.0.gate_proj.weight' is stored as Q4_0, "
        "'model.layers.1.mlp.experts.0.up_proj.weight' as Q5_0; experts of one layer must have "
        "one encoding"
    )
    with pytest.raises(ModelError, match=re.escape(words)):
        answer(path)


def test_block_scaled_experts_are_read_one_by_one(tmp_path: Path):
    """FP8 as it is published: a matrix and its scales for each expert."""
    tensors = split_up(tmp_path)
    shutil.copytree(tmp_path, rounded := tmp_path / "rounded")
    stored = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            stored[name] = tensor
            continue
        codes = tensor.to(torch.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale_inv": torch.full((1, 1), 0.5)}
        tensors[name] = codes.float() * 0.5
    plain = ["lm_head", "self_attn", "mlp.gate"]
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    quantised["modules_to_not_convert"] = plain
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantised}))
    save_file(stored, tmp_path / "model.safetensors")
    save_file(tensors, rounded / "model.safetensors")
    torch.testing.assert_close(answer(tmp_path), answer(rounded), rtol=0, atol=1e-5)
