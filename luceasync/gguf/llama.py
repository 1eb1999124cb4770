"""Llama: its keys, and the order that the converter gives rows of queries and keys."""

from __future__ import annotations

from typing import Any

from luceasync.gguf.config import Config, Keys, common_config
from luceasync.gguf.order import Order, Orders


def llama_config(keys: Keys) -> Config:
    """The config of a Llama. Raises ModelError."""
    return common_config(keys)


def llama_orders(config: dict[str, Any]) -> dict[str, Orders]:
    """ggml turns neighbours of a head where others turn its halves: row i of the first half is
    stored at 2 i, row i of the second one at 2 i + 1.
    """
    half, orders = config["head_dim"] // 2, {}
    for name, number in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        rows = Order(0, (config[number], half, 2), 1)
        orders[f"self_attn.{name}_proj.weight"] = Orders(rows=rows)
    return orders
