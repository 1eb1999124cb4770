"""The family llama says what transformers says, from a directory that transformers has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from luceasync.errors import ModelError
from luceasync.models.files import ModelFiles, parse_spec, read_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from tests.tiny import COMMON

PROMPT = [(7 * i) % 500 + 3 for i in range(70)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_logits_are_those_of_transformers(tmp_path: Path, tied: bool, num_shards: int):
    expected = written_logits(tmp_path, tied=tied)
    logits = own_logits(tmp_path, num_shards)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_same", [False, True])
def test_a_tied_head_that_is_stored_and_differs_is_a_head_of_its_own(tmp_path: Path, is_same: bool):
    expected = written_logits(tmp_path, tied=is_same)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert read_spec(tmp_path).tied_embeddings is is_same
    torch.testing.assert_close(own_logits(tmp_path, 2), expected, rtol=0, atol=1e-4)


def written_logits(folder: Path, *, tied: bool) -> torch.Tensor:
    """The last logits of a model of transformers, which is written to `folder`."""
    torch.manual_seed(0)
    sizes = COMMON | {"num_hidden_layers": 4, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return logits


def own_logits(tmp_path: Path, num_shards: int) -> torch.Tensor:
    """The last logits as the model's files give them here."""
    spec = read_spec(tmp_path)
    plan = make_plan(
        spec,
        [offer_of(f"cpu:{i}", 2**33) for i in range(num_shards)],
        precision=Precision.of("fp32"),
        weights=None,
        parallel=1,
        max_ctx_tokens=128,
        prefill_chunk_tokens=64,
    )
    backend = LayerSplitBackend.open(ModelFiles(tmp_path), plan)
    backend.prefill(0, 0, PROMPT[:64], project=False)
    logits = backend.prefill(0, 64, PROMPT[64:], project=True)
    backend.close()
    return logits.flatten()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mlp_bias", True),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 8.0}),
    ],
)
def test_what_is_not_computed_is_refused(field: str, value: object):
    config = LlamaConfig(**COMMON, num_hidden_layers=2).to_dict() | {field: value}
    with pytest.raises(ModelError, match="not supported"):
        parse_spec(config)
