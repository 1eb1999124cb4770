"""Qwen3 with experts: the attention of Qwen3, and routed experts in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from luceasync.errors import ModelError
from luceasync.models.families.dense import parse_dense
from luceasync.models.families.family import ConfigFields, Family
from luceasync.models.feed_forward.experts import ExpertsSpec
from luceasync.models.spec import LayerSpec, ModelSpec
from luceasync.models.weights import Routing

# Defaults of transformers for fields that a config leaves out.
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "intermediate_size": 6144,
}


def parse(fields: ConfigFields) -> ModelSpec:
    """The spec of a config. Raises ModelError."""
    fields.must_be("attention_bias", False)
    fields.must_be("use_sliding_window", False)
    fields = fields.with_defaults(DEFAULTS)
    spec = parse_dense(fields, "qwen3_moe", has_head_norms=True)
    normalised = bool(fields.config.get("norm_topk_prob", False))
    experts = parse_experts(fields, is_normalised=normalised)
    dense = _dense_layers(fields, spec.num_layers)
    layers = [
        layer if number in dense else LayerSpec(layer.mixer, experts)
        for number, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers))


def parse_experts(fields: ConfigFields, *, is_normalised: bool) -> ExpertsSpec:
    """Experts whose router's scores are a softmax. Raises ModelError."""
    # transformers writes one name, published configs have the other
    name = "num_local_experts" if "num_local_experts" in fields.config else "num_experts"
    num_experts = fields.positive(name, 128)
    num_chosen = fields.positive("num_experts_per_tok", 8)
    if num_chosen > num_experts:
        raise ModelError(
            f"num_experts_per_tok = {num_chosen}: expected at most {name} = {num_experts}"
        )
    return ExpertsSpec(
        num_experts,
        fields.positive("moe_intermediate_size", 768),
        Routing(num_chosen, is_normalised=is_normalised),
    )


def _dense_layers(fields: ConfigFields, num_layers: int) -> set[int]:
    """The layers without experts: named ones, and all but every `decoder_sparse_step`-th."""
    named = fields.config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise ModelError(f"mlp_only_layers = {named!r}: expected a list of layers")
    step = fields.positive("decoder_sparse_step", 1)
    return {*named} | {layer for layer in range(num_layers) if (layer + 1) % step}


FAMILY = Family("qwen3_moe", parse, ("Qwen3MoeForCausalLM",))
