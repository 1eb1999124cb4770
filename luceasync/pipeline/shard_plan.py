"""The layers of one device and their bytes, as they will be allocated. Pure: no torch.

Owns what a shard takes up. Knows no memory that is free, and not how layers are split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from luceasync.models.spec import ModelSpec
from luceasync.pipeline.offer import Offer

DTYPE_BYTES = {"bf16": 2, "fp32": 4}
VERIFY_SPLITS = 32  # of a context among programs of kernels.tree_attention


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Layers `[begin, end)` on `device`, and their bytes."""

    device: str
    begin: int
    end: int
    is_first: bool
    is_last: bool
    weight_bytes: int
    token_bytes: int  # keys and values of one token, all layers of the shard
    lane_state_bytes: int  # recurrent and convolution state of one lane
    lane_scratch_bytes: int  # what the rows that verify one lane's proposal need
    workspace_bytes: int
    spare_token_bytes: int = 0  # as token_bytes, of a lane more than there are: a guest's padding
    short_rows: tuple[int, ...] = ()  # see Offer
    short_scratch_bytes: int = 0  # of the largest of them, in the rows of what is verified

    def spare_scratch_bytes(self, num_lanes: int) -> int:
        """What a short chunk needs beyond the scratch of so many lanes."""
        return max(0, self.short_scratch_bytes - num_lanes * self.lane_scratch_bytes)


def plan_shard(
    spec: ModelSpec,
    device: Offer,
    begin: int,
    end: int,
    dtype: str,
    *,
    chunk_tokens: int,
    num_verify_rows: int,
    num_lanes: int,
) -> ShardPlan:
    """The bytes of layers `[begin, end)` on `device`, which verifies up to `num_verify_rows` rows
    for each of `num_lanes` lanes.
    """
    size = DTYPE_BYTES[dtype]
    is_first, is_last = begin == 0, end == spec.num_layers
    num_tables = 1 if spec.tied_embeddings and is_first and is_last else is_first + is_last
    table_bytes = spec.vocab_size * spec.hidden_size * size
    weight_bytes = sum(_layer_weight_bytes(spec, layer, size) for layer in range(begin, end))
    weight_bytes += num_tables * table_bytes + is_last * 4 * spec.hidden_size
    kinds = spec.layer_types[begin:end]
    state_bytes = kinds.count("delta") * _state_bytes(spec, size)
    scratch_row_bytes = _scratch_row_bytes(spec, kinds, size)
    num_rows = num_lanes * num_verify_rows
    # While they are verified: the splits of attention, and logits in the model's dtype and float32.
    split_bytes = spec.attention.query_dim * VERIFY_SPLITS * 4
    verified_bytes = max(num_rows, *device.short_rows, 0) * split_bytes
    verified_bytes += is_last * num_rows * spec.vocab_size * (4 + 4)
    staged_bytes = device.num_staged_states * state_bytes
    widest = max(2 * spec.intermediate_size, spec.attention.query_dim * 4, spec.hidden_size * 4)
    return ShardPlan(
        device=device.name,
        begin=begin,
        end=end,
        is_first=is_first,
        is_last=is_last,
        weight_bytes=weight_bytes,
        token_bytes=kinds.count("attention") * 2 * spec.attention.kv_dim * size,
        lane_state_bytes=state_bytes,
        lane_scratch_bytes=num_verify_rows * scratch_row_bytes,
        workspace_bytes=chunk_tokens * widest * 16 + 256 * 2**20 + staged_bytes + verified_bytes,
        short_rows=device.short_rows,
        short_scratch_bytes=max(device.short_rows, default=0) * scratch_row_bytes,
    )


def _state_bytes(spec: ModelSpec, size: int) -> int:
    """Recurrent and convolution state of one Gated DeltaNet layer; 0 where the family has none."""
    delta = spec.delta
    if delta is None:
        return 0
    conv_bytes = (delta.conv_kernel - 1) * delta.conv_channels * size
    return conv_bytes + delta.num_value_heads * delta.key_dim * delta.value_dim * 4


def _scratch_row_bytes(spec: ModelSpec, kinds: Sequence[str], size: int) -> int:
    """As models.scratch.VerifyScratch lays a row out."""
    row_bytes = kinds.count("attention") * 2 * spec.attention.kv_dim * size
    if spec.delta is not None:
        delta = spec.delta
        small = delta.num_key_heads * delta.key_dim + delta.output_dim + delta.num_value_heads
        row_bytes += kinds.count("delta") * (delta.conv_channels * size + small * 4)
    return row_bytes


def _layer_weight_bytes(spec: ModelSpec, layer: int, size: int) -> int:
    """Matrices in the model's dtype; norms and Gated DeltaNet's small tensors in float32."""
    shapes = spec.layer_shapes(layer)
    small = [name for name, shape in shapes.items() if len(shape) != 2]
    return sum(math.prod(s) * (4 if name in small else size) for name, s in shapes.items())
