"""The recall model's network: Qwen3 over whole rows, with Hugging Face's names in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_THETA = 1e7
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one network."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int

    def config(self, eos: int, pad: int) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": eos,
            "pad_token_id": pad,
        }


class Network(nn.Module):
    """Qwen3 with tied embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, NORM_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        """The output of the last norm: [rows, tokens, hidden] from [rows, tokens]."""
        x = self.embed_tokens(tokens)
        turns = _turns(tokens.shape[1], self.sizes.head_dim, tokens.device)
        for layer in self.layers:
            x = layer(x, turns)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)

    def tensors(self) -> dict[str, Tensor]:
        """The weights in bfloat16 on the host, by the names of files."""
        return {
            f"model.{name}": weight.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
            for name, weight in self.state_dict().items()
        }

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors in the form of `tensors`. Raises RuntimeError if they are from another
        network.
        """
        self.load_state_dict({name.removeprefix("model."): x for name, x in tensors.items()})


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self._head_dim = sizes.head_dim
        inner, shared = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(inner, sizes.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(sizes.head_dim, NORM_EPS)
        self.k_norm = nn.RMSNorm(sizes.head_dim, NORM_EPS)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            project(x).unflatten(2, (-1, self._head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (
            _turned(norm(part.float()), turns).to(v.dtype)
            for norm, part in ((self.q_norm, q), (self.k_norm, k))
        )
        heads = (part.transpose(1, 2) for part in (q, k, v))  # [rows, heads, tokens, head_dim]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden_size, NORM_EPS)
        self.self_attn = _Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden_size, NORM_EPS)
        self.mlp = _FeedForward(sizes)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


def _turns(num_tokens: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, 1, head_dim / 2] of each position's rotation, float32."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    places = torch.arange(num_tokens, device=device, dtype=torch.float32)
    angles = torch.outer(places, ROPE_THETA**-pairs)[:, None]
    return angles.cos(), angles.sin()


def _turned(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """[rows, tokens, heads, head_dim], rotated by halves."""
    (cos, sin), (left, right) = turns, heads.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
