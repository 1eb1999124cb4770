"""What a model family contributes to a split target; everything else is the same for all of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from luceasync.errors import Unsupported
from luceasync.kv.cache import LaneCache
from luceasync.models import qwen3, qwen3_5
from luceasync.models.layers import Layer
from luceasync.models.loader import TensorReader
from luceasync.models.spec import ModelSpec

Compress = Callable[[Sequence[int], float], list[int]]


@dataclass(frozen=True, slots=True)
class LayerSplitAdapter:
    """One family.

    `read_layer` reads one decoder layer, wherever it goes; `compress(tokens, keep_ratio)` shortens
    a prompt before prefill and raises Unsupported where the family cannot.
    """

    read_layer: Callable[[TensorReader, int], Layer]
    compress: Compress

    def allocate(
        self,
        spec: ModelSpec,
        layers: range,
        *,
        num_lanes: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LaneCache:
        """State of every lane for `layers`."""
        attention, delta = spec.attention, spec.delta
        return LaneCache(
            [spec.layer_types[layer] for layer in layers],
            first_layer=layers.start,
            num_lanes=num_lanes,
            num_pages=num_pages,
            attention_shape=(attention.num_kv_heads, attention.head_dim),
            conv_shape=(delta.conv_kernel - 1, delta.conv_channels) if delta else (0, 0),
            delta_shape=(delta.num_value_heads, delta.key_dim, delta.value_dim)
            if delta
            else (0, 0, 0),
            dtype=dtype,
            device=device,
        )


def adapter_of(spec: ModelSpec) -> LayerSplitAdapter:
    """The adapter of the spec's family."""
    return _ADAPTERS[spec.family]


def _cannot_compress(family: str) -> Compress:
    def compress(tokens: Sequence[int], keep_ratio: float) -> list[int]:
        raise Unsupported(f"prompt compression is not supported for models of family {family}")

    return compress


_ADAPTERS = {
    "qwen3": LayerSplitAdapter(qwen3.read_layer, _cannot_compress("qwen3")),
    "qwen3_5": LayerSplitAdapter(qwen3_5.read_layer, _cannot_compress("qwen3_5")),
}
