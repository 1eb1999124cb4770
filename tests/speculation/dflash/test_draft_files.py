"""Quantised drafters, as vLLM reads them and in GGUF files, propose what the same numbers do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from luceasync.errors import ModelError
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.ops import TorchOps
from luceasync.models.precision import Precision
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.platform import open_platform
from luceasync.ranking.proposals import DraftCandidates
from luceasync.speculation.dflash.dflash2 import selecting_head
from luceasync.speculation.dflash.draft import open_network
from luceasync.speculation.dflash.draft_config import read_draft_spec
from luceasync.speculation.dflash.draft_files import DraftFiles
from luceasync.speculation.dflash.draft_gguf import stored_name
from luceasync.speculation.dflash.load import selector_on
from luceasync.speculation.dflash.placement import DFlashPlacement
from tests import tiny
from tests.gguf.tiny_files import encoded
from tests.models.quant.checkpoints.test_schemes import INT4, compressed
from tests.reference import quantised as truth

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 24}
KINDS = {"dflash": SLIDING, "dflash2": SLIDING | tiny.DFLASH2}
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    return tiny.save(tiny.build("qwen3"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=KINDS)
def plain(request, tmp_path_factory) -> Path:
    config = tiny.draft_config(**KINDS[request.param])
    return tiny.save_draft(tmp_path_factory.mktemp("plain") / "draft", config, seed=5)


def with_tensors(plain: Path, folder: Path, tensors) -> Path:
    """The same drafter with other numbers."""
    folder.mkdir()
    (folder / "config.json").write_text((plain / "config.json").read_text())
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and tensor.shape[1] % 32 == 0 and "codebook" not in name


def packed(plain: Path, folder: Path) -> tuple[Path, Path]:
    """In four bits, as compressed-tensors stores it, and the same numbers plainly."""
    stored, numbers = {}, {}
    for seed, (name, tensor) in enumerate(sorted(load_file(plain / FILE).items())):
        stored[name] = numbers[name] = tensor
        if is_matrix(name, tensor):
            del stored[name]
            parts, numbers[name] = truth.pack_quantized(*tensor.shape, 32, seed=seed)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": own.contiguous() for part, own in parts.items()}
    quant = with_tensors(plain, folder / "packed", stored)
    path = quant / "config.json"
    scheme = compressed("pack-quantized", **INT4 | {"group_size": 32, "symmetric": True})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": scheme}))
    return quant, with_tensors(plain, folder / "numbers", numbers)


def in_gguf(plain: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """In a GGUF file, and the same numbers plainly."""
    config = json.loads((plain / "config.json").read_text())
    folder.mkdir(exist_ok=True)
    path, numbers = folder / "draft.gguf", {}
    writer = gguf.GGUFWriter(path, "dflash")
    add_metadata(writer, config)
    for name, tensor in load_file(plain / FILE).items():
        numbers[name] = tensor
        own = stored_name(name)
        if kind == "F32" or not (is_matrix(name, tensor)):
            writer.add_tensor(own, tensor.numpy())
            continue
        rows = encoded(tensor.numpy(), kind, seed=3)
        ggml_type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(own, rows, raw_dtype=ggml_type)
        numbers[name] = torch.from_numpy(gguf.dequantize(rows, ggml_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, with_tensors(plain, folder / "numbers", numbers)


def add_metadata(writer: gguf.GGUFWriter, config) -> None:
    inner = config["dflash_config"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_uint32("dflash.block_size", config["block_size"])
    writer.add_uint32("tokenizer.ggml.mask_token_id", inner["mask_token_id"])
    writer.add_array("dflash.target_layers", [tap + 1 for tap in inner["target_layer_ids"]])
    if "is_causal" in config:
        writer.add_bool("dflash.attention.causal", config["is_causal"])
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if name in inner:
            writer.add_uint32(f"dflash.{name}", inner[name])
    for name in ("output_multiplier", "final_logit_softcapping"):
        if name in inner:
            writer.add_float32(f"dflash.{name}", inner[name])


@torch.no_grad()
def proposed(path: Path, target_dir: Path) -> tuple[torch.Tensor, list]:
    """Hidden rows behind a context of random features, and the tokens that a selector chooses."""
    spec = read_draft_spec(path, read_spec(target_dir))
    generator = torch.Generator().manual_seed(2)
    embedding = torch.randn(tiny.VOCAB_SIZE, spec.hidden_size, generator=generator)
    sizes = {"num_lanes": 1, "max_ctx_tokens": 128, "dtype": torch.float32}
    network = open_network(
        path, spec, TorchOps(), lambda ids: embedding[ids], device=torch.device("cpu"), **sizes
    )
    features = torch.randn(1, 40, spec.feature_size, generator=generator)
    lanes, begins, counts, anchors = (torch.tensor([n]) for n in (0, 0, 40, 7))
    network.write_context(features, lanes, begins, counts)
    hidden = network.propose(anchors, lanes, begins + 40, spec.block)
    [device] = find_devices(["cpu"], "--draft-device")
    placement = DFlashPlacement(path, spec, device, ())
    selector = selector_on(open_platform("cpu"), placement, torch.float32)
    num_bytes = network.num_bytes - network.context.num_bytes
    planned = placement.footprint(ModelFiles(target_dir).spec, Precision.of("fp32")).weight_bytes
    assert planned == num_bytes + (0 if selector is None else selector.num_bytes)
    if selector is None:
        return hidden, []
    head = selecting_head(selector, lambda rows, n: best_of(rows, embedding, n))
    return hidden, head(hidden, anchors, None).tokens.tolist()


def best_of(rows, embedding, num_candidates):
    best, ids = (rows @ embedding.T).topk(num_candidates)
    return DraftCandidates(ids, best)


def agree(pair: tuple[Path, Path], target_dir: Path) -> None:
    (hidden, tokens), (other, others) = (proposed(path, target_dir) for path in pair)
    torch.testing.assert_close(hidden, other, atol=2e-4, rtol=2e-4)
    assert tokens == others


def test_four_bits_of_compressed_tensors(plain, target_dir, tmp_path):
    agree(packed(plain, tmp_path), target_dir)


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q8_0"])
def test_gguf_files(plain, target_dir, tmp_path, kind):
    path, numbers = in_gguf(plain, tmp_path, kind)
    specs = [read_draft_spec(each, read_spec(target_dir)) for each in (path, numbers)]
    assert replace(specs[0], norm_eps=specs[1].norm_eps) == specs[1]  # a file has float32
    agree((path, numbers), target_dir)


def test_a_file_of_another_model_is_refused(target_dir, tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor("x.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"--draft .*'qwen3' is no drafter .* expected 'dflash'"):
        read_draft_spec(path, read_spec(target_dir))


def test_tensors_of_other_variants_are_refused(plain, target_dir, tmp_path):
    tensors = load_file(plain / FILE)
    other = with_tensors(plain, tmp_path / "other", tensors | {"markov_w1": torch.ones(2, 2)})
    path, _ = in_gguf(other, tmp_path, "F32")
    spec = read_draft_spec(path, read_spec(target_dir))
    for each in (path, other):
        opened = DraftFiles(each).open(spec)
        with pytest.raises(ModelError, match="'markov_w1' and 0 other tensors"), opened:
            pass


def test_an_unknown_scheme_is_refused(plain, target_dir, tmp_path):
    folder = with_tensors(plain, tmp_path / "other", load_file(plain / FILE))
    path = folder / "config.json"
    scheme = {"quantization_config": {"quant_method": "bitsandbytes"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | scheme))
    with pytest.raises(ModelError, match="quant_method = 'bitsandbytes' is not supported"):
        read_draft_spec(folder, read_spec(target_dir))
