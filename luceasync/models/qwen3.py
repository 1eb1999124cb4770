"""Qwen3, dense: how its checkpoint becomes layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from luceasync.models.layers import AttentionLayer, Layer, Mlp, Norm
from luceasync.models.loader import Part, TensorReader, layer_names, whole
from luceasync.models.ops import AttentionNorms


def read_layer(reader: TensorReader, layer: int) -> Layer:
    """Read decoder layer `layer`. Raises ModelError."""
    projections = [Part(f"{name}_proj.weight", whole) for name in ("q", "k", "v")]
    return read_attention_layer(reader, layer, projections)


def read_attention_layer(
    reader: TensorReader, layer: int, projections: Sequence[Part]
) -> AttentionLayer:
    """An attention layer; `projections` are stacked to query, key, value (and gate)."""
    spec, shapes = reader.spec, layer_names(reader.spec, layer)
    prefix = f"{spec.prefix}layers.{layer}."
    offset = spec.norm_offset
    parts = [replace(part, name=f"{prefix}self_attn.{part.name}") for part in projections]
    return AttentionLayer(
        spec=spec.attention,
        norm=read_norm(reader, layer, "input_layernorm.weight"),
        projection=reader.stacked(parts, shapes),
        head_norms=AttentionNorms(
            query=reader.vector(prefix + "self_attn.q_norm.weight", shapes, offset),
            key=reader.vector(prefix + "self_attn.k_norm.weight", shapes, offset),
            eps=spec.norm_eps,
        ),
        output=reader.matrix([prefix + "self_attn.o_proj.weight"], shapes),
        mlp=read_mlp(reader, layer),
    )


def read_norm(reader: TensorReader, layer: int, name: str) -> Norm:
    """A norm over the residual stream."""
    spec = reader.spec
    full_name = f"{spec.prefix}layers.{layer}.{name}"
    weight = reader.vector(full_name, layer_names(spec, layer), spec.norm_offset)
    return Norm(weight, spec.norm_eps)


def read_mlp(reader: TensorReader, layer: int) -> Mlp:
    """The SwiGLU MLP with its norm."""
    shapes = layer_names(reader.spec, layer)
    prefix = f"{reader.spec.prefix}layers.{layer}.mlp."
    return Mlp(
        norm=read_norm(reader, layer, "post_attention_layernorm.weight"),
        gate_up=reader.matrix([prefix + "gate_proj.weight", prefix + "up_proj.weight"], shapes),
        down=reader.matrix([prefix + "down_proj.weight"], shapes),
    )
