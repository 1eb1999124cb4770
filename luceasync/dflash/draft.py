"""The DFlash draft network on preallocated tensors: context in, a block of hidden rows out.

Owns the drafter's weights and its keys and values of every lane. Knows no target: the embedding is
handed in, and whoever calls projects what `propose` gives with the target's head. Chen et al.,
"DFlash: Block Diffusion for Flash Speculative Decoding", 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.dflash.context import ContextRows, held_positions, rings_of, visible
from luceasync.dflash.spec import DraftLayerSpec, DraftSpec
from luceasync.dflash.weights import DraftLayerWeights, DraftWeights, open_draft, read_weights
from luceasync.models.layers import Ops
from luceasync.models.ops import rms_norm

Embed = Callable[[Tensor], Tensor]  # tokens int64 [...] -> rows [..., hidden]


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Rotary positions; float32 [entries, rows, 1, head_dim] each, `sin` with the first half
    negated.
    """

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """x: float32 [..., entries, rows, heads, head_dim]; halves are paired."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


class DraftNetwork:
    """A drafter on one device.

    `write_context` and `propose` read nothing but tensors on the device and have fixed shapes for
    fixed numbers of entries and rows, so they can be captured as CUDA graphs. An entry of lane -1
    only fills a batch up. Not thread-safe; run under `torch.inference_mode`.
    """

    def __init__(
        self,
        spec: DraftSpec,
        weights: DraftWeights,
        ops: Ops,
        embed: Embed,
        *,
        num_lanes: int,
        max_ctx_tokens: int,
    ) -> None:
        """`weights` are packed for `ops`; `embed` is the target's embedding, and gives rows on the
        device of the weights.
        """
        self.spec = spec
        self.device = weights.fc.device
        self.dtype = weights.fc.dtype
        self._weights = weights
        self._ops = ops
        self._embed = embed
        self.rings = rings_of(
            spec,
            num_lanes=num_lanes,
            max_ctx_tokens=max_ctx_tokens,
            dtype=self.dtype,
            device=self.device,
        )
        self._ring_of = {layer: ring for ring in self.rings for layer in ring.layers}
        # One more for lane -1. Positions below it were never written.
        self.valid_from = torch.zeros(num_lanes + 1, dtype=torch.int64, device=self.device)
        half = torch.arange(0, spec.attention.head_dim, 2, device=self.device)
        self._inverse = spec.attention.rope_theta ** -(half.float() / spec.attention.head_dim)

    def set_valid_from(self, lane: int, position: int) -> None:
        """Context of `lane` below `position` was never written: 0 for a fresh lane, the lane's end
        after a restore without features.
        """
        self.valid_from[lane] = position

    def write_context(
        self, features: Tensor, lanes: Tensor, begins: Tensor, counts: Tensor
    ) -> None:
        """Take up tokens that the target has committed.

        `features` [entries, rows, taps * hidden], any float dtype: the outputs of the tapped layers
        at positions `[begins, begins + rows)`; only the first `counts` rows of an entry are kept.
        `lanes` int32 or int64, `begins`, `counts` int64, all [entries], on the drafter's device. An
        entry may bring more rows than a ring holds. No lane twice in one call.
        """
        spec, weights = self.spec, self._weights
        rows = ContextRows.of(lanes, begins, counts, features.shape[1])
        fused = F.linear(features.to(self.dtype), weights.fc)
        projected = self._ops.norm_linear(
            fused, weights.hidden_norm, spec.norm_eps, weights.context_kv
        )
        heads = (spec.num_layers, 2, spec.attention.num_kv_heads, spec.attention.head_dim)
        # [2, layers, entries, rows, kv_heads, head_dim]
        keys, values = projected.unflatten(-1, heads).permute(3, 2, 0, 1, 4, 5)
        keys = F.rms_norm(keys.float(), keys.shape[-1:], None, spec.norm_eps)
        keys = keys * weights.key_norms[:, None, None, None]
        keys = self._rotation(rows.positions).turn(keys).to(self.dtype)
        for ring in self.rings:
            ring.write(keys, values, rows)

    def propose(
        self,
        anchors: Tensor,
        lanes: Tensor,
        begins: Tensor,
        block: int,
        *,
        reach: int | None = None,
    ) -> Tensor:
        """Hidden rows [entries, block - 1, hidden] for the positions behind the anchors, after the
        final norm: row j predicts the token at begins + 1 + j.

        `anchors` int64 [entries]: each lane's newest token, at position `begins` (int64), for which
        no context has been written yet; `lanes` int32 or int64. `reach` is the caller's promise
        that no entry begins behind it: then no more places are read.
        """
        lanes = lanes.long()
        rotation = self._rotation(begins[:, None] + torch.arange(block, device=self.device))
        sights = self._sights(lanes, begins, block, reach)
        x = self._block_rows(anchors, block)
        for layer, weights in enumerate(self._weights.layers):
            mixed = self._attend(layer, weights, x, lanes, rotation, sights[layer])
            x = weights.mlp.forward(self._ops, self._ops.linear_add(mixed, weights.output, x))
        return rms_norm(x[:, 1:], self._weights.norm, self.spec.norm_eps)

    def _block_rows(self, anchors: Tensor, block: int) -> Tensor:
        """Embeddings [entries, block, hidden]: the anchor's, then the mask's."""
        masks = anchors.new_full((anchors.shape[0], block - 1), self.spec.mask_token)
        x = self._embed(torch.cat([anchors[:, None], masks], 1)).to(self.dtype)
        mask = self._weights.mask_embedding
        if mask is None:
            return x
        return torch.cat([x[:, :1], mask.expand(x.shape[0], block - 1, -1)], 1)

    def _sights(self, lanes: Tensor, begins: Tensor, block: int, reach: int | None) -> list[Tensor]:
        """For each layer what its rows see, as `attend` wants it; layers that see alike share one
        tensor.
        """
        floors = self.valid_from[lanes]
        if self.spec.ctx_max_tokens is not None:
            floors = torch.maximum(floors, begins - self.spec.ctx_max_tokens)
        floors = floors.clamp(min=0)
        group = self.spec.attention.num_heads // self.spec.attention.num_kv_heads
        made: dict[tuple[DraftLayerSpec, int], Tensor] = {}
        for layer, sees in enumerate(self.spec.layers):
            capacity = self._ring_of[layer].capacity
            if (sees, capacity) not in made:
                num_places = capacity if reach is None else min(capacity, reach)
                held = held_positions(begins, capacity, num_places)
                sight = visible(sees, held, floors, begins, block)
                made[sees, capacity] = sight.repeat(1, group, 1)[:, None]
        pairs = enumerate(self.spec.layers)
        return [made[sees, self._ring_of[layer].capacity] for layer, sees in pairs]

    def _attend(
        self,
        layer: int,
        weights: DraftLayerWeights,
        x: Tensor,
        lanes: Tensor,
        rotation: _Rotation,
        sight: Tensor,
    ) -> Tensor:
        """Attention of the block's rows to the context and to each other: [entries, block,
        query_dim].
        """
        spec, norm = self.spec.attention, weights.norm
        projected = self._ops.norm_linear(x, norm.weight, norm.eps, weights.projection)
        heads = projected.unflatten(-1, (-1, spec.head_dim))
        turning, v = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], 2)
        turning = F.rms_norm(turning.float(), turning.shape[-1:], None, norm.eps)
        turning = rotation.turn(turning * weights.head_norms).to(self.dtype)
        q, k = turning.split([spec.num_heads, spec.num_kv_heads], 2)
        num_places = sight.shape[-1] - x.shape[1]
        keys, values = self._ring_of[layer].read(layer, lanes, k, v, num_places)
        return attend(q, keys, values, sight).flatten(2)

    def _rotation(self, positions: Tensor) -> _Rotation:
        """Of absolute positions int64 [entries, rows]."""
        angles = positions.float()[..., None, None] * self._inverse
        cos, sin = angles.cos(), angles.sin()
        return _Rotation(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def close(self) -> None:
        """Let weights and context go. May be called twice."""
        self.rings.clear()
        self._ring_of.clear()
        self._weights = None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and context that are held."""
        rings = sum(ring.num_bytes for ring in self.rings)
        return rings + (self._weights.num_bytes if self._weights else 0)


def attend(q: Tensor, k: Tensor, v: Tensor, sight: Tensor) -> Tensor:
    """Attention with a mask, query heads that share a key head folded into rows of one product.

    q: [entries, rows, heads, head_dim]; k, v: [entries, span, kv_heads, head_dim]; sight: bool
    [entries, 1, group * rows, span], the rows' once for each head of a group. Returns the shape of
    q.
    """
    group = q.shape[2] // k.shape[2]
    folded = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(
        folded,  # [entries, kv_heads, group * rows, head_dim]
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=sight,
    )
    return out.unflatten(2, (group, q.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3)


def open_network(
    draft_dir: Path,
    spec: DraftSpec,
    ops: Ops,
    embed: Embed,
    *,
    num_lanes: int,
    max_ctx_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> DraftNetwork:
    """The drafter in `draft_dir` on `device`, its weights packed for `ops`. Raises ModelError."""
    with open_draft(draft_dir) as source:
        source.check(spec)
        has_mask = source.has_mask_embedding
        weights = read_weights(
            spec, source, ops, dtype, device, has_mask_embedding=has_mask, advance=advance
        )
    return DraftNetwork(
        spec, weights, ops, embed, num_lanes=num_lanes, max_ctx_tokens=max_ctx_tokens
    )
