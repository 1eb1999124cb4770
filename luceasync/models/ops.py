"""The operations that layers are made of, in torch, for any device; prefill runs them everywhere.

The cuts are where a fused kernel pays: luceasync.kernels has the same operations for decode on
GPUs, and these are their slow truth. Knows weights and state as tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from luceasync.models.gated_delta import delta_chunks, delta_step
from luceasync.models.pass_rows import NO_LANE, Rows
from luceasync.models.spec import AttentionSpec, DeltaSpec

BLOCK_ROWS = 2048  # of keys and values in one product of a decode step
NO_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class AttentionNorms:
    """RMS norms of query and key heads, float32 [head_dim] each."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """Gated DeltaNet's small tensors, all float32.

    conv [channels, kernel]; decay_rate = -exp(A_log) [value_heads]; dt_bias [value_heads];
    norm [value_dim].
    """

    conv: Tensor
    decay_rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class TorchOps:
    """The operations as plain torch."""

    def pack(self, weight: Tensor) -> Tensor:
        """`weight` [out, dim] in the form that the operations here take it in."""
        return weight

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight^T for a packed weight. x: [..., dim]."""
        return F.linear(x, weight)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """RMS norm (`norm` float32 [dim]), then x @ weight^T. x: [..., dim], weight: [out, dim]."""
        return self.linear(rms_norm(x, norm, eps), weight)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """residual + x @ weight^T; `residual` may be what is returned, overwritten."""
        return residual + self.linear(x, weight)

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """RMS norm, then silu(gate) * up; gate_up: [2 * inner, dim], gate first. -> [...,
        inner].
        """
        gate, up = self.linear(rms_norm(x, norm, eps), gate_up).chunk(2, -1)
        return F.silu(gate) * up

    def attend(
        self,
        projected: Tensor,
        spec: AttentionSpec,
        norms: AttentionNorms,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
    ) -> Tensor:
        """Write the rows' keys and values, then let every row attend to positions up to its own.

        projected: [entries, rows, query_dim + 2 kv_dim (+ query_dim of gates)], in this order;
        keys, values: [lanes, places, kv_heads, head_dim], written in place.
        Returns [entries, rows, query_dim], multiplied by sigmoid(gate) where the family is gated.
        """
        q, k, v, *gates = projected.split(attention_widths(spec), -1)
        q = rotate(heads_norm(q, spec.head_dim, norms.query, norms.eps), spec, rows)
        k = rotate(heads_norm(k, spec.head_dim, norms.key, norms.eps), spec, rows)
        v = v.unflatten(-1, (-1, spec.head_dim))
        out = torch.zeros_like(q)  # [entries, rows, heads, head_dim]
        for i, entry in enumerate(rows.entries):
            if entry.lane == NO_LANE:
                continue
            keys[entry.lane, entry.write] = k[i]
            values[entry.lane, entry.write] = v[i]
            k_seen, v_seen = keys[entry.lane, entry.read], values[entry.lane, entry.read]
            if q.shape[1] == 1:
                out[i] = attend_one(q[i], k_seen, v_seen, entry.end)
            else:
                out[i] = attention(q[i], k_seen, v_seen)
        out = out.flatten(2)
        for gate in gates:
            out = out * torch.sigmoid(gate)
        return out

    def delta(
        self,
        projected: Tensor,
        spec: DeltaSpec,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
    ) -> Tensor:
        """Causal convolution, gated delta rule and gated norm; both states move on in place.

        projected: [entries, rows, conv_channels + output_dim (z) + 2 value_heads (b, a)];
        conv_state: [lanes + 1, kernel - 1, channels], the newest inputs, oldest first;
        delta_state: float32 [lanes + 1, value_heads, key_dim, value_dim]; the extra lane at the
        end, which index NO_LANE means, takes what padding entries write. Returns [entries, rows,
        output_dim].
        """
        mixed, z, b, a = projected.split(delta_widths(spec), -1)
        lanes = rows.lanes.long()
        q, k, v = delta_heads(_convolve(mixed, parameters.conv, conv_state, lanes), spec)
        g, beta = delta_gates(a, b, parameters)
        state = delta_state[lanes]
        if q.shape[1] == 1:
            out, state = delta_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
            out = out[:, None]
        else:
            out, state = delta_chunks(q, k, v, g, beta, state)
        delta_state[lanes] = state

        return gated_norm(out, z, parameters)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32, in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last rows of one sequence.

    q: [rows, heads, head_dim], the queries of the last `rows` positions; k, v: [span, kv_heads,
    head_dim], in order of position. Returns [rows, heads, head_dim]. Query heads that share a kv
    head are folded into rows of one product: no copy of K/V, and on CPUs an order of magnitude
    faster than plain SDPA.
    """
    if q.shape[0] == 1:
        return attend_one(q, k, v, k.shape[0])
    if q.is_cuda:
        return _attend_cuda(q, k, v)
    num_rows, span = q.shape[0], k.shape[0]
    place = torch.arange(span, device=q.device)
    return masked_attention(q, k, v, place[None, :] <= place[span - num_rows :, None])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of rows to those places that `mask` [rows, span] allows; shapes as in
    `attention`.
    """
    num_rows, group = q.shape[0], q.shape[1] // k.shape[1]
    folded = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
    out = F.scaled_dot_product_attention(
        folded[None],  # [1, kv_heads, group * rows, head_dim]
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask.repeat(group, 1),
    )[0]
    return out.unflatten(1, (group, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)


def attend_one(q: Tensor, k: Tensor, v: Tensor, num_seen: int) -> Tensor:
    """Attention of one query row to the first `num_seen` rows of k and v; those behind them may
    hold anything finite. Shapes as in `attention`.

    CPU libraries compile a product anew for every shape and keep it: rows come in blocks, and in
    whole chunks of 64, so that there are few shapes however long a sequence grows. The products
    are written so that neither K nor V is copied on its way.
    """
    num_kv_heads, head_dim = k.shape[1:]
    folded = q.view(num_kv_heads, -1, head_dim) * head_dim**-0.5  # [kv_heads, group, head_dim]
    scores = torch.cat(
        [
            (block.transpose(0, 1) @ folded.transpose(1, 2)).transpose(1, 2)
            for block in k.split(BLOCK_ROWS)
        ],
        -1,
    )
    scores[..., num_seen:] = -torch.inf
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    blocks = zip(weights.split(BLOCK_ROWS, -1), v.split(BLOCK_ROWS), strict=True)
    return sum(share @ block.transpose(0, 1) for share, block in blocks).view_as(q)


def _attend_cuda(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Not by cuDNN: for every shape that is new it first builds a plan, 20 ms on an H200."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    causal = causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(NO_PLANS):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)
    return out[0].transpose(0, 1)


def attention_widths(spec: AttentionSpec) -> list[int]:
    """Widths of query, key, value (and gate) in the projection of attention."""
    gates = [spec.query_dim] if spec.gated else []
    return [spec.query_dim, spec.kv_dim, spec.kv_dim, *gates]


def heads_norm(x: Tensor, head_dim: int, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head. x: [..., heads * head_dim] -> [..., heads, head_dim]."""
    return rms_norm(x.unflatten(-1, (-1, head_dim)), weight, eps)


def rotate(x: Tensor, spec: AttentionSpec, rows: Rows) -> Tensor:
    """Rotary position embedding, halves paired (neox). x: [entries, rows, heads, head_dim]."""
    half = spec.rotary_dim // 2
    first, second, rest = x.split([half, half, spec.head_dim - 2 * half], -1)
    first, second = first.float(), second.float()
    cos, sin = rows.cos[:, :, None], rows.sin[:, :, None]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def _convolve(x: Tensor, weight: Tensor, state: Tensor, lanes: Tensor) -> Tensor:
    """Depthwise causal convolution and SiLU, float32. x: [entries, rows, channels]."""
    window = torch.cat([state[lanes], x], 1)  # [entries, kernel - 1 + rows, channels]
    kernel = weight.shape[1]
    state[lanes] = window[:, window.shape[1] - kernel + 1 :]
    num_rows = x.shape[1]
    window = window.float()
    out = sum(window[:, i : i + num_rows] * weight[:, i] for i in range(kernel))
    return F.silu(out)


def delta_widths(spec: DeltaSpec) -> list[int]:
    """Widths of query|key|value, z, b and a in the projection of Gated DeltaNet."""
    return [spec.conv_channels, spec.output_dim, spec.num_value_heads, spec.num_value_heads]


def delta_heads(mixed: Tensor, spec: DeltaSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value heads, float32 [entries, rows, value_heads, dim] each, of what the
    convolution gave; query and key L2-normalised and shared by groups of value heads.
    """
    width = spec.num_key_heads * spec.key_dim
    q, k, v = mixed.split([width, width, spec.output_dim], -1)
    q, k = _key_heads(q, spec) * spec.key_dim**-0.5, _key_heads(k, spec)
    return q, k, v.unflatten(-1, (spec.num_value_heads, spec.value_dim))


def delta_gates(a: Tensor, b: Tensor, parameters: DeltaParameters) -> tuple[Tensor, Tensor]:
    """Log decay g and write strength beta, float32 [entries, rows, value_heads]."""
    g = parameters.decay_rate * F.softplus(a.float() + parameters.dt_bias)
    return g, b.float().sigmoid()


def gated_norm(out: Tensor, z: Tensor, parameters: DeltaParameters) -> Tensor:
    """RMS norm of each head, times silu(z); [entries, rows, output_dim] in z's dtype."""
    out = F.rms_norm(out, parameters.norm.shape, parameters.norm, parameters.eps)
    return (out * F.silu(z.float().view_as(out))).flatten(2).to(z.dtype)


def _key_heads(x: Tensor, spec: DeltaSpec) -> Tensor:
    """L2-normalised key heads, repeated for the value heads that share them."""
    x = x.unflatten(-1, (spec.num_key_heads, spec.key_dim))
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(spec.num_value_heads // spec.num_key_heads, 2)
