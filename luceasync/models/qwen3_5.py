"""Qwen3.5, hybrid: Gated DeltaNet layers with gated attention between them; the text part."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from luceasync.models.layers import DeltaLayer, Layer
from luceasync.models.loader import Part, TensorReader, layer_names, whole
from luceasync.models.ops import DeltaParameters
from luceasync.models.qwen3 import read_attention_layer, read_mlp, read_norm
from luceasync.models.spec import AttentionSpec


def read_layer(reader: TensorReader, layer: int) -> Layer:
    """Read decoder layer `layer`. Raises ModelError."""
    if reader.spec.layer_types[layer] == "delta":
        return _read_delta_layer(reader, layer)
    # q_proj holds query and gate of each head side by side; ours has the gates at the end.
    attention = reader.spec.attention
    queries, gates = (_of_each_head(attention, which) for which in (0, 1))
    projections = [
        Part("q_proj.weight", queries, divisor=2),
        Part("k_proj.weight", whole),
        Part("v_proj.weight", whole),
        Part("q_proj.weight", gates, divisor=2),
    ]
    return read_attention_layer(reader, layer, projections)


def _of_each_head(spec: AttentionSpec, which: int) -> Callable[[Tensor], Tensor]:
    """Selects the query (0) or the gate (1) rows of every head."""

    def select(stored: Tensor) -> Tensor:
        by_head = stored.unflatten(0, (spec.num_heads, 2, spec.head_dim))
        return by_head[:, which].flatten(0, 1)

    return select


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
