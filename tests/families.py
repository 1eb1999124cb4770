"""Tiny random models of each family, as transformers runs them: those whose layers, ropes, windows,
experts or ends differ, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests import tiny

if TYPE_CHECKING:  # else only tests that build a model pay for it
    from transformers import PreTrainedModel

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
DELTA = {
    "shared_expert_intermediate_size": 48,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
}
LAGUNA = EXPERTS | {"shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 2.5}
WINDOWS = {
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "num_attention_heads_per_layer": [4, 6, 6, 4],
    "sliding_window": 24,
    "rope_parameters": {
        "full_attention": YARN | {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "moe_router_logit_softcapping": 3.0,
}
# By name: the model type, and what differs from tests.tiny.COMMON.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 3": (
        "gemma3_text",
        {
            "layer_types": MIXED,
            "sliding_window": 24,
            "query_pre_attn_scalar": 40,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma 4, 31B": (
        "gemma4_text",
        {
            "layer_types": MIXED[::2] + MIXED[1:3],
            "sliding_window": 24,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma 4, 26B-A4B": (
        "gemma4_text",
        {
            "layer_types": [MIXED[0], MIXED[2]] * 2,
            "sliding_window": 24,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma 4, E4B": (
        "gemma4_text",
        {
            "layer_types": [MIXED[0], MIXED[2]] * 2,
            "sliding_window": 24,
            "tie_word_embeddings": True,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 2,
        },
    ),
    "gemma 4, E2B": (
        "gemma4_text",
        {
            "layer_types": [MIXED[0], MIXED[2]] * 2,
            "num_key_value_heads": 1,
            "sliding_window": 24,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma 4, all of it": (
        "gemma4_text",
        {
            "layer_types": [MIXED[0], MIXED[2], MIXED[0], MIXED[2]],
            "sliding_window": 24,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma 4, 12B": (
        "gemma4_unified_text",
        {
            "layer_types": [MIXED[0], MIXED[2]] * 2,
            "sliding_window": 24,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
        },
    ),
    "llama 2": ("llama", {}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama 3.2": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "ministral": ("ministral", {"layer_types": ["full_attention"] * 4}),
    "ministral, windows": ("ministral", {"layer_types": MIXED, "sliding_window": 24}),
    "mistral, devstral": (
        "mistral",
        {"sliding_window": None, "head_dim": 32, "rope_parameters": {"rope_theta": 1e8}},
    ),
    "mistral, windows alone": ("mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("qwen2", {"head_dim": 32}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2, windows above": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 2},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3_moe, as is": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [2]}),
    # With larger weights its states carry rounding on: 3e-4 of logits.
    "qwen3_5_moe": ("qwen3_5_moe_text", EXPERTS | DELTA | {"initializer_range": 0.1}),
    "laguna XS": ("laguna", LAGUNA | WINDOWS),
    "laguna S": (
        "laguna",
        LAGUNA | WINDOWS | {"num_attention_heads_per_layer": [6, 10, 10, 6]},
    ),
    "laguna M.1": (
        "laguna",
        LAGUNA
        | {"gating": "per-element", "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}
        | {"num_experts_per_tok": 5},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}),
    "smollm3, by interval": ("smollm3", {"no_rope_layer_interval": 2, "head_dim": 32}),
}


# One for each way that layers keep something, or take it from each other.
OWN_WAYS = ("gemma 3", "gemma 4, 31B", "gemma 4, 26B-A4B", "gemma 4, E2B")
OWN_WAYS += ("laguna XS", "laguna M.1", "llama 3.2", "mistral, devstral", "mistral, windows alone")
OWN_WAYS += ("qwen2, windows above", "smollm3")


def build(name: str) -> PreTrainedModel:
    """The model of `MODELS`, float32, with norms and biases that are not all alike, and layers that
    weigh so much beside the last token that answers do not repeat it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model_type, fields = MODELS[name]
    sizes = {"num_hidden_layers": 4, "pad_token_id": 0, "initializer_range": 0.2}
    config = AutoConfig.for_model(model_type, **tiny.COMMON | sizes | fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.3
        if model_type.startswith("gemma"):  # which scale it
            model.get_input_embeddings().weight *= 0.2
        for part, buffer in model.named_buffers():
            if part.endswith("layer_scalar"):
                buffer *= 1 + torch.rand(1).item()
    return model


def answer_of(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Its greedy answer."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
    return ids[0, len(prompt) :].tolist()
