"""Well-known models as their configurations, and what a pass over one cannot avoid. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
}


def step_bytes(shape: Shape, plan: Plan, num_lanes: int, context: int) -> int:
    """Bytes that a decode step in 16 bits cannot avoid to read: every weight once (of an untied
    embedding only rows) and the keys and values of every lane.
    """
    weights = sum(shard.weight_bytes for shard in plan.shards)
    if len(plan.shards) > 1 or not shape["tie_word_embeddings"]:
        weights -= _embedding_parameters(shape) * 2
    return weights + num_lanes * context * sum(shard.token_bytes for shard in plan.shards)


def state_bytes(plan: Plan, num_lanes: int) -> int:
    """Bytes of the recurrent states of the lanes, which a step reads and writes."""
    return 2 * num_lanes * sum(shard.lane_state_bytes for shard in plan.shards)


def prefill_flops(shape: Shape, num_parameters: int, num_tokens: int) -> float:
    """Matrix products of every layer and causal attention; the head runs for one row only."""
    tables = 1 if shape["tie_word_embeddings"] else 2
    layers = num_parameters - tables * _embedding_parameters(shape)
    num_attention = int(shape["num_hidden_layers"] // shape.get("full_attention_interval", 1))
    query_dim = int(shape["num_attention_heads"] * shape["head_dim"])
    return 2.0 * layers * num_tokens + num_attention * 2.0 * num_tokens**2 * query_dim


def _embedding_parameters(shape: Shape) -> int:
    return int(shape["vocab_size"]) * int(shape["hidden_size"])
