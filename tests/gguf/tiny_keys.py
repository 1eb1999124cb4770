"""The metadata of tiny models in GGUF files, as llama.cpp's converter writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

if TYPE_CHECKING:
    from tests.gguf.tiny_files import Tiny

# Of a tiny Gemma 4, beside the sizes that all have.
GEMMA4 = {
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
}


def add_keys(writer: gguf.GGUFWriter, arch: str, tiny: Tiny, config: Any) -> None:
    """What the header says of the model, as its converter writes it."""
    writer.add_block_count(tiny.num_layers + (tiny.mtp or tiny.nextn))
    if tiny.mtp or tiny.nextn:
        writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if tiny.has_experts:
        writer.add_expert_count(8)
        writer.add_expert_used_count(3)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "gemma4":
        size, num_borrowing = config.intermediate_size, config.num_kv_shared_layers
        wide = [size * (1 + config.use_double_wide_mlp)] * num_borrowing
        sizes = [size] * (tiny.num_layers - num_borrowing) + wide
        writer.add_feed_forward_length(sizes if num_borrowing else size)
    elif "moe" not in arch:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(getattr(config, "num_attention_heads_per_layer", None) or 4)
    if arch == "gemma4":
        _add_gemma4(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(_whole_rope(config.rope_parameters)["rope_theta"])
    if arch in ("gemma3", "gemma4", "laguna"):
        writer.add_sliding_window(config.sliding_window)
    _add_rope(writer, tiny.rope or {}, config)
    if arch == "laguna":
        writer.add_rope_dimension_count(config.head_dim // 2)
        writer.add_rope_dimension_count_swa(config.head_dim)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_float32(f"{arch}.rope.freq_base_swa", 10000.0)
        if "attention_factor" in (tiny.rope or {}):
            writer.add_rope_scaling_yarn_attn_factor(tiny.rope["attention_factor"])
    if arch in ("laguna", "qwen35moe"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if tiny.is_hybrid:
        writer.add_rope_dimension_count(config.head_dim // 4)
        pairs = config.head_dim // 8
        writer.add_rope_dimension_sections([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(tiny.head_dim)
        writer.add_ssm_group_count(2)
        writer.add_ssm_time_step_rank(tiny.value_heads)
        writer.add_ssm_inner_size(tiny.value_heads * tiny.head_dim)
        writer.add_uint32(f"{arch}.full_attention_interval", 4)


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """Its heads of two sizes, and divisors that leave all but a quarter of a head in place."""
    flags = [kind == "sliding_attention" for kind in config.layer_types]
    local = config.per_layer_config["sliding_attention"].head_dim
    full, pairs = GEMMA4["global_head_dim"], GEMMA4["global_head_dim"] // 2
    for name in ("key_length", "value_length"):
        getattr(writer, f"add_{name}")(full)
        getattr(writer, f"add_{name}_swa")(local)
    layers = [config.per_layer_config[layer] for layer in range(len(flags))]
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_sliding_window_pattern(flags)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(local)
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    divisors = np.array([1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def _whole_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rope of layers that see all tokens."""
    whole: dict[str, Any] = parameters.get("full_attention", parameters)
    return whole


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any], config: Any) -> None:
    """Its scaling as keys, or as a tensor of divisors."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope.get("rope_type")
    if kind == "llama3":
        plain = 1.0 / 10000.0 ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        scaled, _ = ROPE_INIT_FUNCTIONS[kind](config)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    elif kind is not None:
        scaling = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
        writer.add_rope_scaling_type(scaling[kind])
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
