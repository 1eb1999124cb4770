"""Gemma 3's configs, as hubs have had them over the years, and its vision wrapper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from luceasync.errors import ModelError
from luceasync.models.files import parse_spec
from luceasync.models.rope import PLAIN, LinearRope
from tests import tiny

PROMPT = [(7 * i) % 500 + 3 for i in range(70)]
# What the config of the 4B model says, which leaves much to defaults.
HUB_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
HUB = {"model_type": "gemma3", "text_config": HUB_TEXT, "eos_token_id": [1, 106]}


def test_what_a_hub_leaves_to_defaults_is_known():
    spec = parse_spec(HUB)
    assert (spec.num_layers, spec.vocab_size, spec.eos_ids) == (34, 262208, {1, 106})
    assert spec.tied_embeddings and spec.embedding_scale == 2560**0.5
    windows = [mixer.window for mixer in spec.mixers]
    assert windows == [0 if layer % 6 == 5 else 1024 for layer in range(34)]
    ropes = {(m.window, m.rope_theta, m.rope) for m in spec.mixers}
    assert ropes == {(0, 1e6, LinearRope(8.0)), (1024, 1e4, PLAIN)}


def test_older_fields_of_rope_say_what_newer_ones_say():
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    text = {name: value for name, value in HUB_TEXT.items() if name != "rope_scaling"}
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert parse_spec(HUB_TEXT | older) == parse_spec(text | {"rope_parameters": new})
    assert parse_spec(HUB_TEXT | {"rope_local_base_freq": 3e4}) != parse_spec(HUB_TEXT)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types = .*: expected 34 entries"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not supported"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping = -1: expected a positive"),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], words: str):
    with pytest.raises(ModelError, match=f"^{words}"):
        parse_spec(HUB_TEXT | fields)


def wrapped(folder: Path) -> Path:
    """The tiny model with the names and the nested config of a checkpoint that sees images."""
    from safetensors.torch import load_file, save_file

    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    file = folder / "model.safetensors"
    renamed = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(renamed | {"vision_tower.embeddings.weight": torch.zeros(3, 3)}, file)
    return folder


def test_the_text_half_of_a_model_that_sees_images_is_the_same(tmp_path: Path, make_backend):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = tiny.COMMON | {"num_hidden_layers": 6, "sliding_window": 24}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, tie_word_embeddings=True)).eval()
    plain = tiny.save(model, tmp_path / "plain")
    logits = make_backend(plain).prefill(0, 0, PROMPT, project=True)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    other = make_backend(wrapped(tiny.save(model, tmp_path / "wrapped")))
    assert torch.equal(other.prefill(0, 0, PROMPT, project=True), logits)
