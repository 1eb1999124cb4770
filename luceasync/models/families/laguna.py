"""Laguna (Poolside): attention alternates between all tokens and windows, with gated heads whose
number differs by layer, and experts chosen by sigmoids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from luceasync.errors import ModelError
from luceasync.models.families.dense import FULL, SLIDING, parse_attention, sliding
from luceasync.models.families.family import ConfigFields, Family
from luceasync.models.families.qwen3_moe import parse_experts
from luceasync.models.feed_forward.dense import DenseSpec
from luceasync.models.feed_forward.experts import ExpertsSpec
from luceasync.models.feed_forward.feed_forward import FeedForward
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.spec import LayerSpec, ModelSpec

Gate = Literal["head", "element"]
DENSE, SPARSE = "dense", "sparse"
# Defaults of transformers for fields that a config leaves out.
DEFAULTS = {
    "vocab_size": 100352,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
}
ROPES = {
    FULL: {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
GATES: Mapping[object, Gate] = {
    True: "head",
    "per-head": "head",
    "per_head": "head",
    "per-element": "element",
    "per_element": "element",
}


def parse(fields: ConfigFields) -> ModelSpec:
    """The spec of a config. Raises ModelError."""
    fields = fields.with_defaults(DEFAULTS)
    fields.must_be("hidden_act", "silu")
    fields.must_be("attention_bias", False)
    fields.must_be("moe_apply_router_weight_on_input", False)
    num_layers = fields.positive("num_hidden_layers")
    dense = DenseSpec(fields.positive("intermediate_size"))
    networks: dict[str, FeedForward] = {DENSE: dense, SPARSE: _experts(fields)}
    sparse = [DENSE] + [SPARSE] * (num_layers - 1)
    kinds = _listed(fields, "mlp_layer_types", sparse, (DENSE, SPARSE))
    pairs = zip(_mixers(fields, num_layers), kinds, strict=True)
    return ModelSpec(
        family="laguna",
        prefix="model.",
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        layers=tuple(LayerSpec(mixer, networks[kind]) for mixer, kind in pairs),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=0.0,
        tied_embeddings=bool(fields.config.get("tie_word_embeddings", False)),
        max_positions=fields.positive("max_position_embeddings"),
        eos_ids=fields.eos_ids(),
    )


def _experts(fields: ConfigFields) -> ExpertsSpec:
    experts = parse_experts(fields, is_normalised=True)
    routing = replace(
        experts.routing,
        scores="sigmoid",
        scale=fields.number("moe_routed_scaling_factor", 1.0),
        softcap=_softcap(fields),
    )
    shared_size = fields.positive("shared_expert_intermediate_size")
    return replace(experts, routing=routing, shared_size=shared_size, has_bias=True)


def _softcap(fields: ConfigFields) -> float:
    name = "moe_router_logit_softcapping"
    return fields.number(name) if fields.config.get(name) else 0.0


def _mixers(fields: ConfigFields, num_layers: int) -> list[AttentionSpec]:
    """The attention of each layer."""
    kinds = _listed(fields, "layer_types", [FULL] * num_layers, (FULL, SLIDING))
    gates = _gates(fields, num_layers)
    name = "num_attention_heads_per_layer"
    heads = fields.config.get(name) or [fields.positive("num_attention_heads")] * num_layers
    fits = isinstance(heads, Sequence) and len(heads) == num_layers
    if not fits or not all(type(number) is int and number > 0 for number in heads):
        raise ModelError(f"{name} = {heads!r}: expected {num_layers} positive integers")
    each = zip(kinds, heads, gates, strict=True)
    return [_attention(fields, kind, number, gate) for kind, number, gate in each]


def _attention(fields: ConfigFields, kind: str, num_heads: int, gate: Gate) -> AttentionSpec:
    given = fields.mapping("rope_parameters")
    rope = {**ROPES[kind], **(given.get(kind) or {})} if given else ROPES[kind]
    own = ConfigFields({**fields.config, "num_attention_heads": num_heads, "rope_parameters": rope})
    share = own.rotary_share(1.0)
    attention = parse_attention(own, gated=False, rotary_factor=share)
    attention = replace(attention, softplus_gate=gate)
    return attention if kind == FULL else sliding(attention, fields.positive("sliding_window"))


def _gates(fields: ConfigFields, num_layers: int) -> list[Gate]:
    """The kind of gate of each layer: `gating_types`, or `gating` for all."""
    common = fields.config.get("gating", True)
    kinds = fields.config.get("gating_types") or [common] * num_layers
    fits = isinstance(kinds, Sequence) and len(kinds) == num_layers
    if not fits or not all(isinstance(kind, bool | str) and kind in GATES for kind in kinds):
        raise ModelError(
            f"gating = {common!r}, gating_types = {fields.config.get('gating_types')!r}: expected "
            "per-head or per-element"
        )
    return [GATES[kind] for kind in kinds]


def _listed(
    fields: ConfigFields, name: str, default: list[str], allowed: tuple[str, str]
) -> list[str]:
    """A word for each layer. Raises ModelError."""
    found: Any = fields.config.get(name) or default
    fits = isinstance(found, list) and len(found) == len(default)
    if not fits or not all(kind in allowed for kind in found):
        raise ModelError(f"{name} = {found!r}: expected {len(default)} entries of {allowed}")
    return [*found]


FAMILY = Family("laguna", parse, ("LagunaForCausalLM",))
