"""Shapes of models that need no weights."""

from __future__ import annotations

from luceasync.models.files import parse_spec
from luceasync.models.spec import ModelSpec


def make_spec(num_layers: int = 8, max_positions: int = 32768) -> ModelSpec:
    return parse_spec(
        {
            "model_type": "qwen3",
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": max_positions,
        }
    )


def make_hybrid_spec(**fields: int) -> ModelSpec:
    """8 layers, 6 of them Gated DeltaNet, and a context larger than any memory."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8}
    return parse_spec(
        {
            "model_type": "qwen3_5_text",
            "max_position_embeddings": 2**24,
            **sizes,
            **heads,
            **fields,
        }
    )


def make_windowed_spec(window: int = 1024, *, num_layers: int = 8) -> ModelSpec:
    """Every fourth layer sees all tokens, the others a window."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": num_layers}
    layers = {"layer_types": [kinds[i % 4] for i in range(num_layers)], "sliding_window": window}
    return parse_spec({"model_type": "ministral", **sizes, **heads, **layers})
