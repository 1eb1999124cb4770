"""Which tensors of a drafter's directory are read, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from luceasync.errors import ModelError
from luceasync.models.encodings import WeightPlacement
from luceasync.models.files import parse_spec
from luceasync.models.ops import TorchOps
from luceasync.speculation.dflash.draft_config import parse_draft_spec
from luceasync.speculation.dflash.draft_files import DraftFiles
from luceasync.speculation.dflash.weights import read_weights
from tests import tiny

SPEC = parse_draft_spec(tiny.draft_config(), parse_spec(tiny.build("qwen3").config.to_dict()))


def rewritten(folder, change):
    """The tiny drafter with `change` made to its tensors, by name."""
    path = tiny.save_draft(folder, tiny.draft_config()) / "model.safetensors"
    save_file(change(load_file(path)), path)
    return folder


def read(folder):
    files = DraftFiles(folder)
    with files.open(SPEC) as source:
        place = WeightPlacement(TorchOps(), torch.device("cpu"), torch.float32)
        has_mask = files.has_mask_embedding
        return read_weights(SPEC, source, place, has_mask_embedding=has_mask)


@pytest.mark.parametrize(
    "rename",
    [
        {},
        {"": "model."},
        {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."},
    ],
)
def test_tensors_are_found_under_all_their_public_names(tmp_path, rename):
    def renamed(tensors):
        for old, new in rename.items():
            tensors = {
                n.replace(old, new, 1) if n.startswith(old) else n: t for n, t in tensors.items()
            }
        return tensors

    plain = read(tiny.save_draft(tmp_path / "plain", tiny.draft_config()))
    other = read(rewritten(tmp_path / "other", renamed))
    assert torch.equal(other.fc.rows, plain.fc.rows)
    assert torch.equal(other.hidden_norm.weight, plain.hidden_norm.weight)
    assert torch.equal(other.layers[1].projection.rows, plain.layers[1].projection.rows)


def test_matrices_may_be_stored_as_one(tmp_path):
    def fused(tensors):
        for layer in range(2):
            for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
                begin = f"layers.{layer}.{whole.partition('.')[0]}."
                rows = [tensors.pop(f"{begin}{part}_proj.weight") for part in parts]
                tensors[f"layers.{layer}.{whole}_proj.weight"] = torch.cat(rows)
        return tensors

    plain = read(tiny.save_draft(tmp_path / "plain", tiny.draft_config()))
    other = read(rewritten(tmp_path / "other", fused))
    assert torch.equal(other.context_kv.rows, plain.context_kv.rows)
    for ours, theirs in zip(other.layers, plain.layers, strict=True):
        assert torch.equal(ours.projection.rows, theirs.projection.rows)
        gate_up = (each.feed_forward.network.gate_up.rows for each in (ours, theirs))
        assert torch.equal(*gate_up)


def test_context_rows_are_keys_then_values_layer_by_layer(tmp_path):
    weights = read(tiny.save_draft(tmp_path, tiny.draft_config()))
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"layers.{i}.self_attn.{n}_proj.weight" for i in (0, 1) for n in "kv"]
    assert torch.equal(weights.context_kv.rows, torch.cat([tensors[name] for name in names]))


def test_a_mask_embedding_of_its_own_is_read(tmp_path):
    mask = torch.arange(64.0)
    folder = rewritten(tmp_path, lambda tensors: tensors | {"mask_embedding": mask})
    assert torch.equal(read(folder).mask_embedding, mask)
    assert read(tiny.save_draft(tmp_path / "plain", tiny.draft_config())).mask_embedding is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {"layers.0.attention_conv.base_kernel": torch.ones(2)}, "attention_conv"),
        (lambda t: t | {"layers.2.self_attn.q_proj.weight": torch.ones(2)}, r"layers\.2"),
        (lambda t: {n: t[n] for n in t if n != "norm.weight"}, r"no tensor 'norm\.weight'"),
        (lambda t: t | {"fc.weight": torch.ones(64, 128)}, r"expected \(64, 192\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, change, words):
    with pytest.raises(ModelError, match=words):
        read(rewritten(tmp_path, change))


def test_what_is_the_targets_own_is_passed_over(tmp_path):
    read(rewritten(tmp_path, lambda tensors: tensors | {"embed_tokens.weight": torch.ones(2)}))
