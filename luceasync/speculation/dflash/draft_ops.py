"""What a draft network does with its context, in torch, for any device: the reference for the fused
kernels in triton_draft_ops, which GPUs run.

Knows a drafter's rings and heads; neither its matrices nor its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.mixers.attention_torch import frequencies
from luceasync.models.ops import Norm, rms_norm
from luceasync.speculation.dflash.context import (
    ContextRows,
    DraftContext,
    held_positions,
    reach_for,
    visible,
)
from luceasync.speculation.dflash.draft_spec import DraftLayerSpec, DraftSpec


@dataclass(frozen=True, slots=True)
class AttendedLayer:
    """What operations take of a layer: the norm before it, and float32 [heads + kv_heads,
    head_dim], the norms of query heads, then of key heads.
    """

    norm: Norm
    head_norms: Tensor


class LayerNorms(Protocol):
    """A layer's norms; see AttendedLayer."""

    @property
    def norm(self) -> Norm: ...

    @property
    def head_norms(self) -> Tensor: ...


class DraftOps(Protocol):
    """Operations on the context; TorchDraftOps says what each means."""

    def reach_for(self, position: int) -> int | None: ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def block(self, lanes: Tensor, begins: Tensor, num_rows: int, reach: int | None) -> Any: ...

    def attend(self, layer: int, projected: Tensor, weights: LayerNorms, block: Any) -> Tensor: ...

    def write_context(
        self, projected: Tensor, key_norms: Tensor, lanes: Tensor, begins: Tensor, counts: Tensor
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Rotary positions; float32 [entries, rows, 1, head_dim] each, `sin` with the first half
    negated.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, inverse: Tensor) -> _Rotation:
        """For absolute positions int64 [entries, rows]; `inverse` of `inverse_frequencies`."""
        angles = positions.float()[..., None, None] * inverse
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def apply(self, x: Tensor) -> Tensor:
        """x: float32 [..., entries, rows, heads, head_dim]; halves are paired."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The rows of one pass; `masks`: the attention mask of each layer, see `attend`."""

    lanes: Tensor
    rotation: _Rotation
    masks: list[Tensor]


class TorchDraftOps:
    """The operations as plain torch. An entry of lane -1 is padding."""

    def __init__(self, spec: DraftSpec, context: DraftContext) -> None:
        self._spec = spec
        self._context = context
        self._inverse = inverse_frequencies(spec, context.valid_from.device)

    def reach_for(self, position: int) -> int | None:
        """How many places a pass must read for a block that begins at `position`, which is part of
        its shape; None if passes for all positions are the same.
        """
        return reach_for(position)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of [..., dim], in the dtype of x; weight float32 [dim]."""
        return rms_norm(x, weight, eps)

    def block(self, lanes: Tensor, begins: Tensor, num_rows: int, reach: int | None) -> DraftBlock:
        """What `attend` needs in all layers, for rows at positions `[begins, begins + num_rows)` of
        `lanes`, [entries] each. No entry begins behind `reach`.
        """
        lanes = lanes.long()
        positions = begins[:, None] + torch.arange(num_rows, device=begins.device)
        rotation = _Rotation.at(positions, self._inverse)
        return DraftBlock(lanes, rotation, self._masks(lanes, begins, num_rows, reach))

    def attend(
        self, layer: int, projected: Tensor, weights: LayerNorms, block: DraftBlock
    ) -> Tensor:
        """Norm and rotate heads; attention of the block's rows to the context and to each other.

        projected: [entries, rows, query_dim + 2 kv_dim], in this order. Returns [entries, rows,
        query_dim].
        """
        q, keys, values = self.heads(layer, projected, weights, block)
        return attend(q, keys, values, block.masks[layer]).flatten(2)

    def heads(
        self, layer: int, projected: Tensor, weights: LayerNorms, block: DraftBlock
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [entries, rows, heads, head_dim], and keys and values [entries, rows + places,
        kv_heads, head_dim]: the block's own, then those of the context.
        """
        spec, mask = self._spec.attention, block.masks[layer]
        heads = projected.unflatten(-1, (-1, spec.head_dim))
        rotated, v = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], 2)
        rotated = F.rms_norm(rotated.float(), rotated.shape[-1:], None, weights.norm.eps)
        rotated = block.rotation.apply(rotated * weights.head_norms).to(projected.dtype)
        q, k = rotated.split([spec.num_heads, spec.num_kv_heads], 2)
        num_places = mask.shape[-1] - projected.shape[1]
        keys, values = self._context.ring_of(layer).read(layer, block.lanes, k, v, num_places)
        return q, keys, values

    def write_context(
        self, projected: Tensor, key_norms: Tensor, lanes: Tensor, begins: Tensor, counts: Tensor
    ) -> None:
        """Write context at positions from `begins` on, the first `counts` rows of each entry.

        projected: [entries, rows, layers * 2 * kv_dim], of each layer the keys, which are to be
        normed and rotated, then the values; key_norms: float32 [layers, head_dim]; `lanes` int32
        or int64, `begins`, `counts` likewise, [entries] each. No lane twice.
        """
        spec = self._spec
        rows = ContextRows.of(lanes, begins, counts, projected.shape[1])
        heads = (spec.num_layers, 2, spec.attention.num_kv_heads, spec.attention.head_dim)
        # [2, layers, entries, rows, kv_heads, head_dim]
        keys, values = projected.unflatten(-1, heads).permute(3, 2, 0, 1, 4, 5)
        keys = F.rms_norm(keys.float(), keys.shape[-1:], None, spec.norm_eps)
        keys = keys * key_norms[:, None, None, None]
        keys = _Rotation.at(rows.positions, self._inverse).apply(keys).to(projected.dtype)
        for ring in self._context.rings:
            ring.write(keys, values, rows)

    def _masks(
        self, lanes: Tensor, begins: Tensor, num_rows: int, reach: int | None
    ) -> list[Tensor]:
        """Layers with the same mask share one tensor."""
        spec = self._spec
        floors = self._context.valid_from[lanes]
        if spec.ctx_max_tokens is not None:
            floors = torch.maximum(floors, begins - spec.ctx_max_tokens)
        floors = floors.clamp(min=0)
        group = spec.attention.num_heads // spec.attention.num_kv_heads
        made: dict[tuple[DraftLayerSpec, int], Tensor] = {}
        masks = []
        for layer, sees in enumerate(spec.layers):
            capacity = self._context.ring_of(layer).capacity
            if (sees, capacity) not in made:
                num_places = capacity if reach is None else min(capacity, reach)
                held = held_positions(begins, capacity, num_places)
                mask = visible(sees, held, floors, begins, num_rows)
                made[sees, capacity] = mask.repeat(1, group, 1)[:, None]
            masks.append(made[sees, capacity])
        return masks


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention with a mask. Query heads that share a key head are folded into rows of one product.

    q: [entries, rows, heads, head_dim]; k, v: [entries, span, kv_heads, head_dim]; mask: bool
    [entries, 1, group * rows, span], the rows' mask repeated for each head of a group. Returns
    the shape of q.
    """
    group = q.shape[2] // k.shape[2]  # query heads of a key head
    folded = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(
        folded,  # [entries, kv_heads, group * rows, head_dim]
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
    )
    rows: Tensor = out.unflatten(2, (group, q.shape[1])).permute(0, 3, 1, 2, 4)
    return rows.flatten(2, 3)


def inverse_frequencies(spec: DraftSpec, device: torch.device) -> Tensor:
    """The angles by which RoPE (Su et al., 2021) turns each pair at position 1: float32
    [head_dim / 2]. Pairs behind those that the attention turns stay.
    """
    attention = spec.attention
    num_still = (attention.head_dim - attention.rotary_dim) // 2
    return F.pad(frequencies(attention, device), (0, num_still))
