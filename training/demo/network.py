"""The network for training: Qwen3.5's text model, whole sequences at once, no cache.

Owns the architecture and its numerics, with the parameter names of Hugging Face checkpoints.
Independent of text, training and files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Sizes of the network. Every `attention_interval`-th layer is full attention."""

    vocab_size: int = 8192
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_layers: int = 12
    attention_interval: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_fraction: float = 0.25
    rope_theta: float = 1e6
    num_key_heads: int = 2
    num_value_heads: int = 4
    linear_head_dim: int = 64
    conv_kernel: int = 4
    rms_norm_eps: float = 1e-6

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval == 0


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight)).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """x / rms(x) * weight * silu(gate), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y * self.weight * F.silu(gate.float())


class Attention(nn.Module):
    """Causal attention: grouped keys, partial rotary positions, a sigmoid gate on the output."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        inner, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)  # per head: query, gate
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = (batch, tokens, -1, self.config.head_dim)
        q, gate = self.q_proj(x).view(batch, tokens, self.config.num_heads, -1).chunk(2, dim=-1)
        q = rotate(self.q_norm(q), self.config)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), self.config)
        v = self.v_proj(x).view(heads)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        out = out.transpose(1, 2) * torch.sigmoid(gate)  # [batch, tokens, heads, head_dim]
        return self.o_proj(out.reshape(batch, tokens, -1))


def rotate(x: Tensor, config: NetworkConfig) -> Tensor:
    """Rotary positions on the first part of each head; x is [batch, tokens, heads, head_dim]."""
    size = int(config.head_dim * config.rotary_fraction)
    exponents = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
    positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
    angles = positions[:, None, None] / config.rope_theta**exponents  # [tokens, 1, size / 2]
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., : size // 2].float(), x[..., size // 2 : size].float()
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., size:]], dim=-1)


class GatedDeltaNet(nn.Module):
    """Linear attention with a decaying, error-correcting state (arXiv:2412.06464)."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.key_size = config.num_key_heads * config.linear_head_dim
        self.value_size = config.num_value_heads * config.linear_head_dim
        conv_size = 2 * self.key_size + self.value_size
        self.in_proj_qkv = nn.Linear(config.hidden_size, conv_size, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, self.value_size, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, config.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, config.num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            conv_size, conv_size, config.conv_kernel, groups=conv_size, bias=False
        )
        self.A_log = nn.Parameter(torch.empty(config.num_value_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.full((config.num_value_heads,), -3.0))
        self.norm = GatedRMSNorm(config.linear_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(self.value_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = (batch, tokens, -1, self.config.linear_head_dim)
        mixed = F.silu(causal_conv(self.in_proj_qkv(x), self.conv1d.weight))
        q, k, v = mixed.split([self.key_size, self.key_size, self.value_size], dim=-1)
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = torch.sigmoid(self.in_proj_b(x).float())
        repeats = self.config.num_value_heads // self.config.num_key_heads
        q, k = (unit(y.reshape(heads)).repeat_interleave(repeats, dim=2) for y in (q, k))
        with torch.autocast(x.device.type, enabled=False):
            out = gated_delta_rule(
                q * self.config.linear_head_dim**-0.5, k, v.float().reshape(heads), decay, beta
            )
        out = self.norm(out, self.in_proj_z(x).view(heads))
        return self.out_proj(out.reshape(batch, tokens, -1).to(x.dtype))


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise, causal; x is [batch, tokens, channels], weight [channels, 1, kernel]."""
    kernel = weight.shape[-1]
    padded = F.pad(x.float(), (0, 0, kernel - 1, 0))
    return sum(padded[:, i : i + x.shape[1]] * weight[:, 0, i] for i in range(kernel))


def unit(x: Tensor) -> Tensor:
    """x / |x| along the last dimension, in float32."""
    y = x.float()
    return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """All o_t = S_t^T q_t of S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T.

    q, k, v are float32 [batch, tokens, heads, head_dim], decay (g) and beta [batch, tokens, heads];
    tokens a multiple of CHUNK_TOKENS. Within a chunk the corrections solve a triangular system
    (arXiv:2412.06464, section 3.3); across chunks the state obeys S' = M S + N, so that the loop is
    one product per chunk.
    """
    q, k, v = (_chunks(x) for x in (q, k, v))  # [batch, heads, chunks, chunk, head_dim]
    # [batch, heads, chunks, chunk]
    decay, beta = (_chunks(x[..., None])[..., 0] for x in (decay, beta))
    total = decay.cumsum(-1)
    causal = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=q.device).tril()
    # Masked before the exponential: above the diagonal the difference may be large and positive.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    k_beta = k * beta[..., None]
    solve = inverse_unit_lower(((k_beta @ k.transpose(-1, -2)) * between).tril(-1))
    new_values = solve @ (v * beta[..., None])
    old_keys = solve @ (k_beta * total.exp()[..., None])
    scores = (q @ k.transpose(-1, -2)) * between
    k_end = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    keep = torch.eye(k.shape[-1], device=k.device) * total[..., -1].exp()[..., None, None]
    states = _scan(keep - k_end @ old_keys, k_end @ new_values)
    out = (q * total.exp()[..., None] - scores @ old_keys) @ states + scores @ new_values
    return out.flatten(2, 3).transpose(1, 2)


def _chunks(x: Tensor) -> Tensor:
    """[batch, tokens, heads, size] -> [batch, heads, chunks, chunk, size]."""
    return x.transpose(1, 2).unflatten(2, (-1, CHUNK_TOKENS))


def _scan(factors: Tensor, terms: Tensor) -> Tensor:
    """The state before each chunk: S_0 = 0, S_{c+1} = factors_c S_c + terms_c.

    All are [batch, heads, chunks, head_dim, head_dim].
    """
    shape = factors.shape
    # Unbound, not indexed: the gradient is then one stack instead of a sum of padded slices.
    factors, terms = factors.flatten(0, 1).unbind(1), terms.flatten(0, 1).unbind(1)
    states = [torch.zeros_like(terms[0])]
    for factor, term in zip(factors[:-1], terms[:-1], strict=True):
        states.append(torch.baddbmm(term, factor, states[-1]))
    return torch.stack(states, dim=1).view(shape)


def inverse_unit_lower(strictly_lower: Tensor) -> Tensor:
    """(I + L)^-1 for a strictly lower triangular L; its size is a power of two.

    inv([[A, 0], [B, C]]) = [[A', 0], [-C' B A', C']]: with X the inverse of the diagonal blocks and
    B the blocks left of them, X - X B X is that of blocks twice as large. On a GPU a few batched
    products are faster than a batched solver.
    """
    size = strictly_lower.shape[-1]
    rows = torch.arange(size, device=strictly_lower.device)
    inverse = torch.eye(size, device=strictly_lower.device).expand_as(strictly_lower)
    block = 1
    while block < size:
        same_pair = (rows[:, None] // (2 * block)) == (rows[None, :] // (2 * block))
        same_block = (rows[:, None] // block) == (rows[None, :] // block)
        left = strictly_lower * (same_pair & ~same_block)
        inverse = inverse - (left if block == 1 else inverse @ left @ inverse)
        block *= 2
    return inverse


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Residual token mixer, then residual MLP, each behind a norm."""

    def __init__(self, config: NetworkConfig, index: int) -> None:
        super().__init__()
        # Checkpoints name the mixer by its kind.
        self.mixer_name = "self_attn" if config.is_attention(index) else "linear_attn"
        mixer = Attention(config) if config.is_attention(index) else GatedDeltaNet(config)
        self.add_module(self.mixer_name, mixer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + getattr(self, self.mixer_name)(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """Token ids [batch, tokens] to logits [batch, tokens, vocab]; tied embeddings."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed_tokens.weight)
