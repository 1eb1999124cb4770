"""Configurations of well-known and small models, quantised mixes, and the minimum work of a pass.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from luceasync.kv.state import num_bytes
from luceasync.models.encodings import DenseEncoding, Encoding
from luceasync.models.feed_forward.feed_forward import RoutedFeedForward
from luceasync.models.quant.ggml import ENCODINGS
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.expert_plan import expert_layers
from luceasync.pipeline.plan import Plan

Shape = Mapping[str, Any]  # a config.json

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
}
GEMMA3_4B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
}
EXPERTS_35B: dict[str, Any] = QWEN3_5 | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
GEMMA4_31B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262144,
}
SHAPES: dict[str, Shape] = {
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3.5-4b": QWEN3_5
    | {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3.5-27b": QWEN3_5
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    },
    "qwen3.5-35b-a3b": EXPERTS_35B | {"num_hidden_layers": 40},
    "qwen3.5-35b-a3b-8": EXPERTS_35B | {"num_hidden_layers": 8},  # a fifth of its layers
    "gemma3-4b": GEMMA3_4B,
    "gemma3-4b-full": GEMMA3_4B | {"layer_types": ["full_attention"] * 34},  # without windows
    "gemma4-31b-12": GEMMA4_31B | {"num_hidden_layers": 12},  # a fifth of its layers
}


# Small enough for a CPU to run prompts of 32K tokens.
COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
SMALL: dict[str, dict[str, Any]] = {
    "qwen3": COMMON
    | {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "qwen3_5": COMMON
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "rope_parameters": {
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "rope_type": "default",
        },
    },
}
AGENTS = SMALL["qwen3_5"] | {  # the recurrent state per row is as large as that of qwen3.5-27b
    "head_dim": 32,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 12,
}
WIDE = SMALL["qwen3"] | {  # 1 MiB of keys and values per token
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 256,
}

EncodingOf = Callable[[str], Encoding]


def encoding_of(mix: str, num_layers: int) -> EncodingOf:
    """`mix`: "plain", a type such as "Q4_K" for every matrix, or "Q4_K_M"."""
    if mix == "plain":
        return lambda name: DenseEncoding()
    if mix == "Q4_K_M":
        return lambda name: (
            ENCODINGS[_of_medium(name, num_layers)] if _is_matrix(name) else DenseEncoding()
        )
    return lambda name: ENCODINGS[mix] if _is_matrix(name) else DenseEncoding()


def shape_of(name: str) -> Shape:
    """The configuration with that name: one of SHAPES, or "small" and "small-hybrid". Raises
    KeyError.
    """
    return {**SHAPES, "small": SMALL["qwen3"], "small-hybrid": SMALL["qwen3_5"]}[name]


def _of_medium(name: str, num_layers: int) -> str:
    """The types of Q4_K_M: Q6_K for the head, and in half of the layers for value and down
    projections; Q5_K for matrices that combine queries, keys and values; Q4_K for matrices
    of no layer, such as an MTP head's.
    """
    if "embed_tokens" in name:
        return "Q4_K"
    if "lm_head" in name:
        return "Q6_K"
    if "in_proj_qkv" in name:
        return "Q5_K"
    found = re.search(r"layers\.(\d+)\.", name)
    if found is None:
        return "Q4_K"
    layer, eighth = int(found[1]), num_layers // 8
    is_fine = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    return "Q6_K" if is_fine and ("v_proj" in name or "down_proj" in name) else "Q4_K"


def _is_matrix(name: str) -> bool:
    is_small = "norm" in name or "conv1d" in name or name.endswith(("A_log", "dt_bias"))
    is_router = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
    return not is_small and not is_router


def step_bytes(
    spec: ModelSpec, plan: Plan, num_lanes: int, context: int, encoding_of: EncodingOf
) -> int:
    """Bytes that a decode step has to read or write: every weight once (only single rows of an
    embedding that is not the head too, and only the experts that evenly distributed rows choose),
    keys and values of every lane, within their windows, and recurrent states in both directions.
    """
    weights = sum(shard.weight_bytes for shard in plan.shards)
    for layer in expert_layers(spec, 0, spec.num_layers, plan.precision, encoding_of):
        resting = (1 - layer.num_chosen / layer.num_experts) ** num_lanes
        weights -= int(layer.num_bytes * resting)
    if len(plan.shards) > 1 or not spec.tied_embeddings:
        table = (spec.vocab_size, spec.hidden_size)
        weights -= encoding_of(spec.embedding_name).num_bytes(table, plan.precision)
    rows = context * sum(shard.token_bytes for shard in plan.shards)
    rings = [end for mixer in spec.mixers for end in mixer.end if not end.has_spare]
    sizes = [num_bytes([ring], plan.precision) for ring in rings]
    seen = sum(
        size * min(context, ring.shape[0]) // ring.shape[0]
        for ring, size in zip(rings, sizes, strict=True)
    )
    states = 2 * (sum(shard.lane_state_bytes for shard in plan.shards) - sum(sizes))
    return weights + num_lanes * (rows + seen + states)


def prefill_flops(spec: ModelSpec, num_tokens: int) -> float:
    """Operations of every layer's matrix products and of causal attention, ignoring windows; the
    head runs for one row only.
    """
    parameters = sum(map(spec.num_layer_parameters, range(spec.num_layers)))
    for layer in spec.layers:
        if isinstance(kind := layer.feed_forward, RoutedFeedForward):
            sizes = kind.expert_tensors(spec.hidden_size).values()
            resting = 1 - kind.num_chosen / kind.num_experts
            parameters -= int(sum(map(prod, sizes)) * resting)
    query_dims = sum(m.recent.num_heads * m.rows[0].shape[-1] for m in spec.mixers if m.recent)
    return 2.0 * parameters * num_tokens + 2.0 * num_tokens**2 * query_dims
