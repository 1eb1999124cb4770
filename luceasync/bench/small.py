"""Shapes whose prompts of 32K tokens a CPU can run. Pure."""

from __future__ import annotations

from typing import Any

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
AGENTS = SMALL["qwen3_5"] | {  # a state for each row as large as that of qwen3.5-27b
    "head_dim": 32,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 12,
}
WIDE = SMALL["qwen3"] | {  # 1 MiB of keys and values for each token
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 256,
}
