"""Qwen3 and Qwen3.5: their keys, and what the converter has done to the latter's linear layers."""

from __future__ import annotations

from typing import Any

from luceasync.errors import ModelError
from luceasync.gguf.config import Config, Keys, common_config
from luceasync.gguf.order import Order, Orders

RECURRENT = "attention.recurrent_layers"


def qwen3_config(keys: Keys) -> Config:
    """The config of a dense Qwen3. Raises ModelError."""
    config = common_config(keys)
    if config.pop("partial_rotary_factor") != 1.0:
        raise ModelError(f"{keys.name('rope.dimension_count')}: the whole head is expected")
    return config


def qwen35_config(keys: Keys) -> Config:
    """The config of a Qwen3.5. Raises ModelError."""
    key_heads, value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    head_dim, inner = keys.integer("ssm.state_size"), keys.integer("ssm.inner_size")
    if inner != value_heads * head_dim:
        raise ModelError(
            f"{keys.name('ssm.inner_size')} = {inner}: {value_heads} value heads of {head_dim} "
            f"are {value_heads * head_dim}"
        )
    return common_config(keys) | {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        **_layer_types(keys),
    }


def _layer_types(keys: Keys) -> Config:
    """Told layer by layer, or by how many there are from one of attention to the next."""
    name = keys.name(RECURRENT)
    if name not in keys.metadata:
        return {"full_attention_interval": keys.integer("full_attention_interval", 4)}
    flags = keys.metadata.integers(name)[: keys.num_layers]
    return {"layer_types": ["linear_attention" if flag else "full_attention" for flag in flags]}


def qwen35_orders(config: dict[str, Any]) -> dict[str, Orders]:
    """Value heads are stored j * K + g and become g * r + j: of K key heads each has r. By names
    below `layers.N.`; everything else is as it should be.
    """
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if num_keys < 1 or num_values % num_keys or num_values == num_keys:
        return {}  # in order already, or refused by whoever reads the config
    key_rows = 2 * num_keys * config["linear_key_head_dim"]

    def heads(begin: int, dim: int) -> Order:
        return Order(begin, (num_values // num_keys, num_keys, dim), 0)

    dim = config["linear_value_head_dim"]
    moved = {
        "in_proj_qkv.weight": Orders(rows=heads(key_rows, dim)),
        "in_proj_z.weight": Orders(rows=heads(0, dim)),
        "in_proj_b.weight": Orders(rows=heads(0, 1)),
        "in_proj_a.weight": Orders(rows=heads(0, 1)),
        "conv1d.weight": Orders(rows=heads(key_rows, dim)),
        "A_log": Orders(rows=heads(0, 1)),
        "dt_bias": Orders(rows=heads(0, 1)),
        "out_proj.weight": Orders(columns=heads(0, dim)),
    }
    return {f"linear_attn.{name}": orders for name, orders in moved.items()}
