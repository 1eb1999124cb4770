"""Ropes are those of transformers bit for bit: a unit in the last place is a turn at the far end of
a long context.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from luceasync.errors import ModelError
from luceasync.models.families.family import ConfigFields
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_torch import TorchAttention, frequencies
from luceasync.models.rope import NoRope, PlainRope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK = {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, between whole dimensions": YARN | {"truncate": False, "attention_factor": 0.9},
    "yarn, as of DeepSeek": YARN | DEEPSEEK | {"factor": 40},
    "yarn, of a short context": YARN | {"original_max_position_embeddings": 16},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional, stretched": {"rope_type": "proportional", "factor": 8.0},
}


def peer_of(rope: dict[str, Any], theta: float, head_dim: int) -> tuple[dict[str, Any], Any]:
    """A config, and what transformers turns heads with."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=rope | {"rope_theta": theta},
    )
    return config.to_dict(), LlamaRotaryEmbedding(config)


def attention_of(config: dict[str, Any]) -> AttentionSpec:
    theta, rope = ConfigFields(config).rope()
    head_dim = config["head_dim"]
    return AttentionSpec(4, 4, head_dim, head_dim, theta, False, rope=rope)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (1e6, 128), (5e5, 80), (1e7, 256)])
def test_frequencies_and_turns_are_those_of_transformers(
    rope: dict[str, Any], theta: float, head_dim: int
):
    config, peer = peer_of(rope, theta, head_dim)
    spec = attention_of(config)
    assert torch.equal(frequencies(spec, torch.device("cpu")), peer.inv_freq)
    positions = torch.tensor([[0, 1, 63, 4096, 131071]], dtype=torch.int32)
    ours = TorchAttention(spec).prepare(positions)
    theirs = peer(torch.zeros(1), positions)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other[..., : head_dim // 2])


def test_every_type_that_transformers_knows_is_known_or_refused_by_name():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {"linear", "llama3", "proportional", "yarn"}
    for name in ROPE_INIT_FUNCTIONS.keys() - known:
        with pytest.raises(ModelError, match=f"rope_type '{name}' is not supported"):
            ConfigFields({"rope_parameters": {"rope_type": name, "factor": 4.0}}).rope()


def test_a_layer_without_rope_keeps_its_heads_as_they_are():
    spec = AttentionSpec(4, 4, 64, 64, 10000.0, False, rope=NoRope())
    cos, sin = TorchAttention(spec).prepare(torch.tensor([[0, 100000]], dtype=torch.int32))
    assert torch.equal(cos, torch.ones(1, 2, 32)) and torch.equal(sin, torch.zeros(1, 2, 32))


def test_kinds_of_layers_may_have_ropes_of_their_own():
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    both = {"full_attention": YARN | {"rope_theta": 5e5}, "sliding_attention": sliding}
    fields = ConfigFields({"rope_parameters": both})
    assert fields.rope("sliding_attention") == (1e4, PlainRope())
    theta, rope = fields.rope("full_attention")
    assert (theta, rope.kind) == (5e5, "yarn")


def test_the_length_of_training_may_stand_outside_or_be_the_models():
    without = {name: value for name, value in LLAMA3.items() if "original" not in name}
    config = {"max_position_embeddings": 4096, "rope_scaling": without}
    _, rope = ConfigFields(config).rope()
    assert rope.original_positions == 4096
    _, rope = ConfigFields(config | {"original_max_position_embeddings": 2048}).rope()
    assert rope.original_positions == 2048


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "linear"}, "factor = None: expected a positive number"),
        (LLAMA3 | {"factor": "8"}, "factor = '8': expected a positive number"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor = 4: expected less than"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings = 0"),
        (YARN | {"attention_factor": -1.0}, "attention_factor = -1.0: expected a positive"),
        (YARN | {"beta_fast": "a"}, "beta_fast = 'a': expected a positive number"),
        ({"rope_type": "proportional", "partial_rotary_factor": 1.5}, "expected at most 1"),
        ({"rope_type": ["yarn"]}, r"rope_type \['yarn'\] is not supported"),
    ],
)
def test_what_a_rope_lacks_is_named(rope: dict[str, Any], words: str):
    with pytest.raises(ModelError, match=words):
        ConfigFields({"rope_parameters": rope}).rope()
