"""The slow truth of DFlash: the drafter as plain matrix products over one sequence, its context
built anew for every round from the target's hidden states, and the greedy loop around it.

`Mistake` puts the usual errors in, one at a time, to show that a comparison would catch them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Mistake:
    """`tap_shift`: layers read too late; `anchor_seen`: the context includes the anchor's position;
    `flip_causal`: sliding layers look ahead in the block, full ones do not; `relative`: positions
    counted from the anchor for the block only; `window_shift`: windows too wide. `second`, of
    DFlash2: "output": the kernels of an output come from the output; "sides": the two sides are
    exchanged; "late cap": tokens are chosen before logits are capped; "no chain": each slot follows
    the anchor.
    """

    tap_shift: int = 0
    anchor_seen: bool = False
    flip_causal: bool = False
    relative: bool = False
    window_shift: int = 0
    second: str = ""


class SlowDrafter:
    """One drafter, from its directory, in float32."""

    def __init__(self, draft_dir: Path, target: Any, mistake: Mistake = Mistake()) -> None:
        self.config: dict[str, Any] = json.loads((draft_dir / "config.json").read_text())
        self.weights = load_file(draft_dir / "model.safetensors")
        self.target = target
        self.mistake = mistake
        self.is_laguna = "DFlashLagunaForCausalLM" in self.config["architectures"]

    def hidden(self, ids: list[int], begin: int, block: int) -> Tensor:
        """[block - 1, hidden] behind `ids[begin]`, the anchor; what follows it in `ids` is only
        there for the mistakes.
        """
        config, weights, mistake = self.config, self.weights, self.mistake
        end = begin + 1 if mistake.anchor_seen else begin
        taps = [tap + mistake.tap_shift for tap in config["dflash_config"]["target_layer_ids"]]
        features = residuals(self.target, ids, taps)[:end]
        if self.is_laguna:
            parts = features.split(config["hidden_size"], -1)
            names = [f"aux_hidden_norms.{tap}.weight" for tap in range(len(taps))]
            features = torch.cat([self._norm(*pair) for pair in zip(parts, names, strict=True)], -1)
        context = self._norm(features @ weights["fc.weight"].T, "hidden_norm.weight")
        masks = [config["dflash_config"]["mask_token_id"]] * (block - 1)
        x = self.target.get_input_embeddings()(torch.tensor([ids[begin], *masks]))
        x = x * config.get("input_embedding_scale", 1.0)
        for layer in range(config["num_hidden_layers"]):
            x = self._layer(layer, x, context, begin)
        return self._norm(x, "norm.weight")[1:]

    def propose(self, ids: list[int], begin: int, block: int) -> list[int]:
        """The drafted tokens behind the anchor."""
        hidden = self.hidden(ids, begin, block)
        logits = self.target.get_output_embeddings()(hidden)
        if "candidate_selector.hidden_projection.weight" in self.weights:
            return self._selected(hidden, logits, ids[begin])
        return logits.argmax(-1).tolist()

    def _selected(self, hidden: Tensor, logits: Tensor, anchor: int) -> list[int]:
        """DFlash2's choice, from left to right: of the best tokens of each slot the one with the
        highest sum of its own score and that of following the token before it.
        """
        names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        before, after, projection = (self.weights[f"candidate_selector.{name}"] for name in names)
        fields = self.config["dflash_config"]
        logits = logits * fields.get("output_multiplier", 1.0)
        cap = fields.get("final_logit_softcapping")
        capped = cap * torch.tanh(logits / cap) if cap else logits
        own_of = logits if self.mistake.second == "late cap" else capped
        path = [anchor]
        for row, own in zip(hidden, own_of, strict=True):
            last = anchor if self.mistake.second == "no chain" else path[-1]
            scores = {
                int(token): float(own[token] + (before[last] * (projection @ row)) @ after[token])
                for token in own.topk(fields["selector_top_k"]).indices
            }
            path.append(max(scores, key=scores.__getitem__))
        return path[1:]

    def _convolved(self, x: Tensor, made_of: Tensor, name: str, side: int) -> Tensor:
        """Each row of a block mixed with the one before it, by kernels of `made_of`'s rows."""
        base = self.weights[name + ".base_kernel"]
        num_sides, num_taps, hidden = base.shape
        side = side if self.mistake.second != "sides" else 1 - side
        size = self.config["dflash_config"]["conv_group_size"]
        dynamic = made_of @ self.weights[name + ".kernel_projection.weight"].T
        dynamic = dynamic.view(len(x), num_sides, num_taps, hidden // size)
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(num_taps, row + 1)):
                kernel = base[side, tap] + dynamic[row, side, tap].repeat_interleave(size)
                out[row] += kernel * x[row - tap]
        return out

    def _layer(self, layer: int, x: Tensor, context: Tensor, begin: int) -> Tensor:
        config, prefix = self.config, f"layers.{layer}."
        heads = config["num_attention_heads"] // config["num_key_value_heads"]
        seen, rows = torch.arange(len(context)), torch.arange(len(x))
        ahead = 0 if self.mistake.relative else begin
        u = self._norm(x, prefix + "input_layernorm.weight")
        if self.is_laguna:
            context = self._norm(context, prefix + "input_layernorm.weight")
        normed, is_second = u, prefix + "attention_conv.base_kernel" in self.weights
        if is_second:
            u = self._convolved(u, normed, prefix + "attention_conv", 0)
        both = torch.cat([context, u])
        at = torch.cat([seen, ahead + rows])
        q = self._heads(u, prefix + "self_attn.q", ahead + rows)
        k = self._heads(both, prefix + "self_attn.k", at).repeat_interleave(heads, 1)
        v = both @ self.weights[prefix + "self_attn.v_proj.weight"].T
        v = v.unflatten(-1, (-1, config["head_dim"])).repeat_interleave(heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config["head_dim"] ** -0.5
        mask = self._mask(layer, torch.cat([seen, begin + rows]), begin + rows, len(context))
        probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", probabilities, v)
        if self.is_laguna:
            gate = torch.nn.functional.softplus(
                u @ self.weights[prefix + "self_attn.g_proj.weight"].T
            )
            mixed = mixed * gate.unflatten(-1, (mixed.shape[1], -1))
        mixed = mixed.flatten(1)
        mixed = mixed @ self.weights[prefix + "self_attn.o_proj.weight"].T
        if is_second:
            of = mixed if self.mistake.second == "output" else normed
            mixed = self._convolved(mixed, of, prefix + "attention_conv", 1)
        x = x + mixed
        u = normed = self._norm(x, prefix + "post_attention_layernorm.weight")
        gate, up, down = (
            self.weights[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
        )
        if is_second:
            u = self._convolved(u, normed, prefix + "mlp_conv", 0)
        mixed = (torch.nn.functional.silu(u @ gate.T) * (u @ up.T)) @ down.T
        return x + (self._convolved(mixed, normed, prefix + "mlp_conv", 1) if is_second else mixed)

    def _mask(self, layer: int, keys: Tensor, queries: Tensor, num_context: int) -> Tensor:
        """bool [queries, keys], by position."""
        kinds = self.config.get("layer_types") or ["full_attention"] * (layer + 1)
        slides = kinds[layer] == "sliding_attention"
        is_causal = self.config.get("is_causal", slides) != self.mistake.flip_causal
        in_block = torch.arange(len(keys)) >= num_context
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if is_causal:
            mask &= ~in_block | (keys <= queries[:, None])
        if slides:
            window = self.config["sliding_window"] + self.mistake.window_shift
            mask &= (queries[:, None] - keys).abs() < window
        return mask

    def _heads(self, x: Tensor, name: str, positions: Tensor) -> Tensor:
        """Projected, normed and rotated: [rows, heads, head_dim]."""
        size = self.config["head_dim"]
        x = (x @ self.weights[name + "_proj.weight"].T).unflatten(-1, (-1, size))
        x = self._norm(x, name + "_norm.weight")
        inverse = self.config["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        angles = (positions[:, None] * inverse).repeat(1, 2)[:, None]
        turned = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * angles.cos() + turned * angles.sin()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return x * mean.rsqrt() * self.weights[name]


@torch.no_grad()
def residuals(target: Any, ids: list[int], taps: list[int]) -> Tensor:
    """The residual stream after each tapped layer, side by side: [tokens, taps * hidden]. Taken by
    hooks: transformers' last hidden state has gone through the final norm.
    """
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: Any, given: Any, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    layers = target.model.layers
    handles = [layers[tap].register_forward_hook(keep(tap)) for tap in taps]
    target(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return torch.cat([outputs[tap][0] for tap in taps], -1)


@torch.no_grad()
def greedy_loop(
    drafter: SlowDrafter, prompt: list[int], num_tokens: int, block: int
) -> tuple[list[int], list[int]]:
    """At least `num_tokens` tokens behind the prompt, and how many each round emitted."""
    target, ids = drafter.target, list(prompt)
    ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    rounds: list[int] = []
    while len(ids) < len(prompt) + num_tokens:
        begin = len(ids) - 1
        drafts = drafter.propose(ids, begin, block)
        logits = target(torch.tensor([ids + drafts])).logits[0, begin:]
        truth = logits.argmax(-1).tolist()
        accepted = next((i for i, d in enumerate(drafts) if d != truth[i]), len(drafts))
        ids += truth[: accepted + 1]
        rounds.append(accepted + 1)
    return ids[len(prompt) :], rounds
