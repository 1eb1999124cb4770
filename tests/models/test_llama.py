"""The family llama says what transformers says, from a directory that transformers has written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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
    torch.manual_seed(0)
    sizes = COMMON | {"num_hidden_layers": 4, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
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
    torch.testing.assert_close(logits.flatten(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mlp_bias", True),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ],
)
def test_what_is_not_computed_is_refused(field: str, value: object):
    config = LlamaConfig(**COMMON, num_hidden_layers=2).to_dict() | {field: value}
    with pytest.raises(ModelError, match="not supported"):
        parse_spec(config)
