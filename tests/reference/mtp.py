"""The slow truth of a head that drafts (MTP): its layer over one sequence as plain matrix products,
from the formulas alone.

    u = fc [ norm(embedding of token t+1) ; norm(h_t) ]      h_t: what the model's head sees at t
    z = norm( layer(u) );  the head's best of z is token t+2;  then again with z and that token

`Mistake` puts the usual errors in, one at a time, to show that a comparison would catch them.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Mistake:
    """`before_norm`: h is taken before the model's final norm; `chained_before_norm`: z before the
    head's; `swapped`: the hidden half of fc is applied to the embedding; `late`: h of the token
    itself; `ungated`: attention without its gate; `whole_heads`: all numbers of heads turn.
    """

    before_norm: bool = False
    chained_before_norm: bool = False
    swapped: bool = False
    late: bool = False
    ungated: bool = False
    whole_heads: bool = False


class SlowHead:
    """The head of the model in a directory, in float32; `model`: as transformers runs it."""

    def __init__(self, folder: Path, model: Any, mistake: Mistake = Mistake()) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.model = model
        self.mistake = mistake

    def draft(
        self, ids: list[int], num_tokens: int, *, begin: int = 0, allowed: Collection[int] = ()
    ) -> list[int]:
        """The tokens that it drafts behind `ids`, whose last one has not been run. `begin`: the
        head has seen nothing before that position. `allowed`: the tokens to choose from, none: all.
        """
        return [token for token, _ in self.steps(ids, num_tokens, begin=begin, allowed=allowed)]

    def steps(
        self, ids: list[int], num_tokens: int, *, begin: int = 0, allowed: Collection[int] = ()
    ) -> list[tuple[int, Tensor]]:
        """As `draft`, each token with the row that the model's head saw for it."""
        with torch.no_grad():
            seen = ids if self.mistake.late else ids[:-1]
            hidden = self._hidden(seen)[begin:]
            hidden = hidden[1:] if self.mistake.late else hidden
            tokens, found = ids[begin + 1 :], []
            for _ in range(num_tokens):
                z = self._layer(self._joined(tokens, hidden))[-1:]
                normed = self._norm(z, "norm")
                logits = self.model.lm_head(normed)[0]
                if allowed:
                    left_out = [t for t in range(len(logits)) if t not in allowed]
                    logits[left_out] = -torch.inf
                token = int(logits.argmax())
                found.append((token, normed[0]))
                hidden = torch.cat([hidden, z if self.mistake.chained_before_norm else normed])
                tokens = [*tokens, token]
            return found

    def round(self, ids: list[int], num_tokens: int) -> list[int]:
        """The model's best tokens behind `ids`, up to the first that was not drafted."""
        found: list[int] = []
        with torch.no_grad():
            for drafted in [*self.draft(ids, num_tokens), None]:
                logits = self.model(torch.tensor([[*ids, *found]])).logits[0, -1]
                found.append(int(logits.argmax()))
                if found[-1] != drafted:
                    break
        return found

    def _hidden(self, ids: list[int]) -> Tensor:
        inner = self.model.model
        if not self.mistake.before_norm:
            return inner(torch.tensor([ids])).last_hidden_state[0]
        rows: list[Tensor] = []
        hook = inner.norm.register_forward_pre_hook(lambda _, args: rows.append(args[0]))
        inner(torch.tensor([ids]))
        hook.remove()
        return rows[0][0]

    def _joined(self, tokens: list[int], hidden: Tensor) -> Tensor:
        embedded = self.model.get_input_embeddings()(torch.tensor(tokens))
        pair = [
            self._norm(embedded, "pre_fc_norm_embedding"),
            self._norm(hidden, "pre_fc_norm_hidden"),
        ]
        if self.mistake.swapped:
            pair.reverse()
        return torch.cat(pair, -1) @ self.weights["mtp.fc.weight"].T

    def _layer(self, x: Tensor) -> Tensor:
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (normed @ self._matrix(f"mlp.{name}_proj") for name in ("gate", "up"))
        return x + (torch.nn.functional.silu(gate) * up) @ self._matrix("mlp.down_proj")

    def _attention(self, x: Tensor) -> Tensor:
        config, num = self.config, len(x)
        heads, kv_heads, dim = (
            config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        both = (x @ self._matrix("self_attn.q_proj")).view(num, heads, 2 * dim)
        q, gate = both[..., :dim], both[..., dim:]
        k, v = (
            (x @ self._matrix(f"self_attn.{name}_proj")).view(num, kv_heads, dim) for name in "kv"
        )
        q = self._turned(self._norm(q, "layers.0.self_attn.q_norm"))
        k = self._turned(self._norm(k, "layers.0.self_attn.k_norm"))
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        later = torch.ones(num, num, dtype=torch.bool).triu(1)
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        if not self.mistake.ungated:
            out = out * torch.sigmoid(gate)
        return out.flatten(1) @ self._matrix("self_attn.o_proj")

    def _turned(self, x: Tensor) -> Tensor:
        """Rotary positions; where they begin does not matter."""
        rope = self.config["rope_parameters"]
        share = 1.0 if self.mistake.whole_heads else rope["partial_rotary_factor"]
        dim = int(x.shape[-1] * share)
        angles = rope["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        turns = (torch.arange(len(x))[:, None] * angles)[:, None]
        first, second, still = x.split([dim // 2, dim // 2, x.shape[-1] - dim], -1)
        cos, sin = turns.cos(), turns.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, still], -1)

    def _matrix(self, name: str) -> Tensor:
        return self.weights[f"mtp.layers.0.{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        rms = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * rms * (1 + self.weights[f"mtp.{name}.weight"])
