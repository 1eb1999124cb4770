"""The drafter for training: many anchors of packed sequences at once, with the public tensor names.

Owns the architecture with gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luceasync.speculation.dflash.draft_spec import DraftLayerSpec, DraftSpec


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Places:
    """The positions in a batch of rows, into which several sequences are packed.

    `positions` int64 [batch, tokens] are those within each token's sequence; `firsts` int64 [batch,
    tokens] are the indices at which the sequences begin; `anchors` and `lengths` int64 [batch,
    anchors] are the anchors' indices, and the number of rows of their blocks, at most `block`.
    """

    def __init__(
        self, positions: Tensor, firsts: Tensor, anchors: Tensor, lengths: Tensor, block: int
    ) -> None:
        self.context = positions
        rows = torch.arange(block, device=anchors.device)
        self.rows = positions.gather(1, anchors)[..., None] + rows  # [batch, anchors, block]
        self.there = rows < lengths[..., None]  # [batch, anchors, block]
        place = torch.arange(positions.shape[1], device=anchors.device)
        seen = place < anchors[..., None]  # the anchor itself is not
        self.seen = seen & (
            place >= firsts.gather(1, anchors)[..., None]
        )  # [batch, anchors, tokens]

    def context_mask(self, layer: DraftLayerSpec) -> Tensor:
        """bool [batch, anchors, block (or 1), tokens]."""
        seen = self.seen[:, :, None]
        if layer.window is None:
            return seen
        return seen & (self.context[:, None, None] > self.rows[..., None] - layer.window)

    def block_mask(self, layer: DraftLayerSpec) -> Tensor:
        """bool [batch, anchors, block, block]; every row sees itself."""
        rows = torch.arange(self.rows.shape[2], device=self.rows.device)
        apart = rows[:, None] - rows
        mask = self.there[:, :, None] | (apart == 0)
        if layer.is_causal:
            mask = mask & (apart >= 0)
        return mask if layer.window is None else mask & (apart.abs() < layer.window)


class Attention(nn.Module):
    """Rows of blocks attend to the context and to their own block."""

    def __init__(self, spec: DraftSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.spec = spec.layers[layer], spec.attention
        hidden, query, kv = spec.hidden_size, spec.attention.query_dim, spec.attention.kv_dim
        self.q_proj = nn.Linear(hidden, query, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(query, hidden, bias=False)
        self.q_norm = RMSNorm(self.spec.head_dim, spec.norm_eps)
        self.k_norm = RMSNorm(self.spec.head_dim, spec.norm_eps)

    def forward(self, u: Tensor, context: Tensor, places: Places) -> Tensor:
        """u: [batch, anchors, block, hidden]; context: [batch, tokens, hidden]."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        # [batch, kv_heads, anchors, group, block, head_dim]
        q = self._rotated(self.q_norm(self._heads(self.q_proj(u))), places.rows)
        q = q.unflatten(3, (-1, group)).permute(0, 3, 1, 4, 2, 5) * self.spec.head_dim**-0.5
        near_k = self._rotated(self.k_norm(self._heads(self.k_proj(u))), places.rows)
        near_k, near_v = (
            x.permute(0, 3, 1, 2, 4)[
                :, :, :, None
            ]  # [batch, kv_heads, anchors, 1, block, head_dim]
            for x in (near_k, self._heads(self.v_proj(u)))
        )
        far_k = self._rotated(self.k_norm(self._heads(self.k_proj(context))), places.context)
        # [batch, kv_heads, tokens, head_dim]
        far_k, far_v = (x.transpose(1, 2) for x in (far_k, self._heads(self.v_proj(context))))
        shape = q.shape[2:5]
        far = (q.flatten(2, 4) @ far_k.transpose(-1, -2)).unflatten(2, shape).float()
        near = (q @ near_k.transpose(-1, -2)).float()
        far_mask = places.context_mask(self.layer)[:, None, :, None]
        far = far.masked_fill(~far_mask, -torch.inf)
        near_mask = places.block_mask(self.layer)[:, None, :, None]
        near = near.masked_fill(~near_mask, -torch.inf)
        highest = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True)).detach()
        far, near = (far - highest).exp(), (near - highest).exp()
        total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
        mixed = (far.to(q.dtype).flatten(2, 4) @ far_v).unflatten(2, shape)
        mixed = (mixed + near.to(q.dtype) @ near_v) / total
        return self.o_proj(mixed.to(u.dtype).permute(0, 2, 4, 1, 3, 5).flatten(3))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.spec.head_dim))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [..., heads, head_dim] at positions [...]; halves are paired."""
        half = torch.arange(0, self.spec.head_dim, 2, device=x.device).float()
        inverse = self.spec.rope_theta ** -(half / self.spec.head_dim)
        angles = positions.float()[..., None, None] * inverse
        first, second = x.float().chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Residual attention, then residual MLP, each behind a norm."""

    def __init__(self, spec: DraftSpec, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(spec, layer)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)

    def forward(self, x: Tensor, context: Tensor, places: Places) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, places)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Maps features and blocks to hidden rows for the target's head."""

    def __init__(self, spec: DraftSpec, target_norm: Tensor) -> None:
        """`target_norm` float32 [hidden] is the scale that the target's head expects."""
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(spec.feature_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.layers = nn.ModuleList(Layer(spec, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.apply(_initialise)
        for layer in self.layers:  # a new layer changes nothing
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        self.norm.weight.data.copy_(target_norm)

    def forward(self, blocks: Tensor, features: Tensor, places: Places) -> Tensor:
        """blocks: embeddings [batch, anchors, block, hidden]; features [batch, tokens, taps *
        hidden]. Returns [batch, anchors, block - 1, hidden].
        """
        context = self.hidden_norm(self.fc(features))
        x = blocks
        for layer in self.layers:
            x = layer(x, context, places)
        return self.norm(x[:, :, 1:])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
