"""Qwen3.5, hybrid: Gated DeltaNet layers with gated attention between them; the text part."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from luceasync.models.layers import DeltaLayer, Layer
from luceasync.models.loader import TensorReader, layer_names
from luceasync.models.ops import DeltaParameters
from luceasync.models.qwen3 import read_attention_layer, read_mlp, read_norm
from luceasync.models.spec import AttentionSpec


def read_layer(reader: TensorReader, layer: int) -> Layer:
    """Read decoder layer `layer`. Raises ModelError."""
    if reader.spec.layer_types[layer] == "delta":
        return _read_delta_layer(reader, layer)
    projections = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
    stored = read_attention_layer(reader, layer, projections)
    projection = _gates_last(stored.projection, reader.spec.attention)
    return dataclasses.replace(stored, projection=projection)


def _gates_last(stacked: Tensor, spec: AttentionSpec) -> Tensor:
    """Rows (query|gate) of each head, key, value -> query, key, value, gate."""
    width = 2 * spec.query_dim
    by_head = stacked[:width].unflatten(0, (spec.num_heads, 2, spec.head_dim))
    queries, gates = by_head[:, 0].flatten(0, 1), by_head[:, 1].flatten(0, 1)
    return torch.cat([queries, stacked[width:], gates])


def _read_delta_layer(reader: TensorReader, layer: int) -> DeltaLayer:
    spec = reader.spec
    assert spec.delta is not None
    shapes = layer_names(spec, layer)
    prefix = f"{spec.prefix}layers.{layer}.linear_attn."
    stacked = [prefix + f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
    return DeltaLayer(
        spec=spec.delta,
        norm=read_norm(reader, layer, "input_layernorm.weight"),
        projection=reader.matrix(stacked, shapes),
        parameters=DeltaParameters(
            conv=reader.vector(prefix + "conv1d.weight", shapes).squeeze(1),
            decay_rate=-reader.vector(prefix + "A_log", shapes).exp(),
            dt_bias=reader.vector(prefix + "dt_bias", shapes),
            norm=reader.vector(prefix + "norm.weight", shapes),
            eps=spec.norm_eps,
        ),
        output=reader.matrix([prefix + "out_proj.weight"], shapes),
        mlp=read_mlp(reader, layer),
    )
