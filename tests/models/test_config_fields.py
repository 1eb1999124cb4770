"""Every field that transformers has in the config of a dense family is honoured, has no effect on
what is computed, or is refused by its name.
"""

from __future__ import annotations

from typing import Any

import pytest

from luceasync.errors import ModelError
from luceasync.models.files import parse_spec

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}
# Fields that change what is computed, with a value other than the default.
HONOURED: dict[str, Any] = {
    "eos_token_id": 7,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "num_attention_heads": 2,
    "num_hidden_layers": 8,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
    "vocab_size": 1024,
}
# Fields of training, of Python objects, and of the tokenizer.
WITHOUT_EFFECT: dict[str, Any] = {
    "_name_or_path": "somewhere",
    "attention_dropout": 0.1,
    "bos_token_id": 9,
    "chunk_size_feed_forward": 2,
    "dtype": "float16",
    "id2label": {"0": "a"},
    "initializer_range": 0.5,
    "is_encoder_decoder": True,
    "label2id": {"a": 0},
    "output_attentions": True,
    "output_hidden_states": True,
    "pad_token_id": 11,
    "problem_type": "regression",
    "return_dict": False,
    "transformers_version": "1.0",
    "use_cache": False,
}
REFUSED: dict[str, Any] = {
    "architectures": ["SomeModelForSequenceClassification"],
    "hidden_act": "gelu",
    "is_causal": False,
    "model_type": "mamba",
}
SLIDING = ["full_attention", "sliding_attention"] * 2
OTHER_LAYERS = ["full_attention", "chunked_attention"] * 2
OF_ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}  # in training
# By model type: what else its config has.
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3_text": {
        "honoured": {
            "final_logit_softcapping": 30.0,
            "head_dim": 32,
            "layer_types": SLIDING,
            "query_pre_attn_scalar": 64,
            "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            "sliding_window": 16,
        },
        "without effect": {"_sliding_window_pattern": 2},
        "refused": {
            "attention_bias": True,
            "attn_logit_softcapping": 50.0,
            "hidden_activation": "silu",
            "use_bidirectional_attention": True,
        },
    },
    "laguna": {
        "honoured": {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "head_dim": 32}
        | {"gating": "per-element", "layer_types": SLIDING, "mlp_layer_types": ["sparse"] * 4}
        | {"num_attention_heads_per_layer": [4, 6, 6, 6], "moe_routed_scaling_factor": 2.5}
        | {"moe_router_logit_softcapping": 3.0}
        | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
        "without effect": {"sliding_window": 16, **OF_ROUTERS},  # no layer has one unless listed
        "refused": {"attention_bias": True, "moe_apply_router_weight_on_input": True},
    },
    "llama": {
        "honoured": {"head_dim": 32},
        "without effect": {"pretraining_tp": 2},
        "refused": {"attention_bias": True, "mlp_bias": True},
    },
    "gemma4_text": {
        "honoured": {
            "attention_k_eq_v": True,
            "enable_moe_block": False,
            "final_logit_softcapping": 30.0,
            "head_dim": 32,
            "hidden_size_per_layer_input": 32,
            "layer_types": ["full_attention"] * 12,
            "moe_intermediate_size": 32,
            "num_experts": 16,
            "num_kv_shared_layers": 1,
            "per_layer_config": {"3": {"head_dim": 128}},
            "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            "sliding_window": 16,
            "top_k_experts": 3,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 64,
        },
        "without effect": {"use_bidirectional_attention": "vision"},
        "refused": {
            "attention_bias": True,
            "hidden_activation": "silu",
        },
    },
    "ministral": {
        "honoured": {"head_dim": 32, "layer_types": SLIDING, "sliding_window": 16},
    },
    "mistral": {"honoured": {"head_dim": 32, "sliding_window": 16}},
    "qwen2": {
        "honoured": {"layer_types": SLIDING, "max_window_layers": 1, "sliding_window": 16}
        | {"use_sliding_window": False},
    },
    "qwen3": {
        "honoured": {"layer_types": SLIDING, "max_window_layers": 1, "sliding_window": 16}
        | {"use_sliding_window": False, "head_dim": 32},
        "refused": {"attention_bias": True},
    },
    "qwen3_moe": {
        "honoured": {"num_local_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
        "without effect": {"sliding_window": 16, **OF_ROUTERS},
        "refused": {"attention_bias": True, "use_sliding_window": True},
    },
    "qwen3_5_moe_text": {
        "honoured": {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "head_dim": 32, "linear_conv_kernel_dim": 2}
        | {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 8}
        | {"linear_num_value_heads": 16, "layer_types": ["full_attention"] * 4},
        "without effect": OF_ROUTERS,
        "refused": {"attention_bias": True},
    },
    "smollm3": {
        "honoured": {"no_rope_layers": [1, 1, 0, 1], "no_rope_layer_interval": 2}
        | {"layer_types": SLIDING, "sliding_window": 16, "use_sliding_window": False},
        "refused": {"attention_bias": True, "mlp_bias": True},
    },
}
OTHER_NAMES = {  # of fields that all have
    "gemma3_text": {"hidden_act": "hidden_activation"},
    "gemma4_text": {"hidden_act": "hidden_activation"},
    "qwen3_5_moe_text": {"intermediate_size": "moe_intermediate_size"},
}
# Windows are in use, so that what is said of them matters.
USED = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
UNLIKE_DEFAULTS = {
    "gemma4_text": {"hidden_size_per_layer_input": 16, "enable_moe_block": True}
    | {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48}
    | {"num_hidden_layers": 12, "num_kv_shared_layers": 2},
    "ministral": {"sliding_window": 32},
    "mistral": {"sliding_window": 32},
    "qwen2": USED,
    "qwen3": USED,
    "qwen3_moe": {"decoder_sparse_step": 2},
    "smollm3": {"use_sliding_window": True, "sliding_window": 32},
}


def config_of(model_type: str, name: str = "", value: object = None) -> dict[str, Any]:
    config = SIZES | UNLIKE_DEFAULTS.get(model_type, {}) | {"model_type": model_type}
    return config | {name: value} if name else config


def fields_of(model_type: str, what: str, common: dict[str, Any]) -> dict[str, Any]:
    fields = common | OWN[model_type].get(what, {})
    return {name: fields[name] for name in fields.keys() - OTHER_NAMES.get(model_type, {}).keys()}


@pytest.mark.parametrize("model_type", OWN)
def test_each_field_is_of_one_kind(model_type: str):
    from transformers import AutoConfig

    listed = [
        *fields_of(model_type, "honoured", HONOURED),
        *fields_of(model_type, "without effect", WITHOUT_EFFECT),
        *fields_of(model_type, "refused", REFUSED),
    ]
    assert len(listed) == len(set(listed))
    theirs = AutoConfig.for_model(model_type).to_dict().keys() | {"is_causal"}
    assert theirs == {*listed}


@pytest.mark.parametrize("model_type", OWN)
def test_what_is_honoured_changes_the_model(model_type: str):
    plain = parse_spec(config_of(model_type))
    for name, value in fields_of(model_type, "honoured", HONOURED).items():
        assert parse_spec(config_of(model_type, name, value)) != plain, name


@pytest.mark.parametrize("model_type", OWN)
def test_what_is_without_effect_does_not(model_type: str):
    plain = parse_spec(config_of(model_type))
    for name, value in fields_of(model_type, "without effect", WITHOUT_EFFECT).items():
        assert parse_spec(config_of(model_type, name, value)) == plain, name


@pytest.mark.parametrize("model_type", OWN)
def test_what_is_not_computed_is_refused_by_its_name(model_type: str):
    for name, value in fields_of(model_type, "refused", REFUSED).items():
        with pytest.raises(ModelError, match=f"^{name} .* is not supported"):
            parse_spec(config_of(model_type, name, value))


@pytest.mark.parametrize("model_type", ["mistral", "ministral"])
def test_a_window_that_a_config_does_not_mention_is_the_default(model_type: str):
    spec = parse_spec(SIZES | {"model_type": model_type})
    assert {mixer.window for mixer in spec.mixers} == {4096}


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "smollm3"])
def test_windows_that_are_not_used_are_without_effect(model_type: str):
    plain = SIZES | {"model_type": model_type}
    fields = {"sliding_window": 16, "max_window_layers": 2}
    assert parse_spec(plain | fields) == parse_spec(plain)
    with pytest.raises(ModelError, match=r"^layer_types .* is not supported"):
        parse_spec(plain | {"layer_types": SLIDING})


def test_a_window_that_no_layer_has_is_without_effect():
    plain = parse_spec(config_of("ministral", "sliding_window", None))
    layers = config_of("ministral", "layer_types", ["full_attention"] * 4)
    assert parse_spec(layers) == plain


@pytest.mark.parametrize("layers", [OTHER_LAYERS, SLIDING[1:], "sliding_attention"])
def test_layers_with_and_without_windows_are_listed_by_name(layers: object):
    with pytest.raises(ModelError, match=r"^layer_types = .*: expected 4 entries of"):
        parse_spec(config_of("ministral", "layer_types", layers))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("1", "no_rope_layers = '1': expected a list of 0 and 1"),
        ([1, 2, 1, 1], r"no_rope_layers = \[1, 2, 1, 1\]: expected a list of 0 and 1"),
        ([1, 1], r"no_rope_layers = \[1, 1\]: expected 4 entries"),
    ],
)
def test_layers_without_rope_are_listed_by_flags(flags: object, words: str):
    with pytest.raises(ModelError, match=words):
        parse_spec(config_of("smollm3", "no_rope_layers", flags))
