"""Gemma 4: like Gemma 3, with heads of two sizes, keys that are also values, normed values and a
factor for each layer; optionally with experts beside each network, inputs of each layer, and layers
that use the keys of an earlier one. Text only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from luceasync.errors import ModelError
from luceasync.models.families.dense import FULL, SLIDING, parse_attention, sliding
from luceasync.models.families.family import ConfigFields, Family
from luceasync.models.families.gemma3 import GELU, layer_kinds
from luceasync.models.feed_forward.feed_forward import FeedForward
from luceasync.models.feed_forward.geglu import GegluSpec
from luceasync.models.feed_forward.geglu_experts import GegluExpertsSpec
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.spec import LayerInputs, LayerSpec, ModelSpec
from luceasync.models.weights import Routing

DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
}
# Defaults of the 12B, whose configs have no fields for inputs of each layer.
UNIFIED = DEFAULTS | {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
ROPES: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
GLOBAL_HEAD_DIM = 512
KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm")  # of attention
INTERVAL = 6


def parse(fields: ConfigFields) -> ModelSpec:
    """The spec of a text model's config. Raises ModelError."""
    return _parse(fields.with_defaults(DEFAULTS), prefix="model.")


def parse_wrapped(fields: ConfigFields) -> ModelSpec:
    """The spec of the text part of a model of several media. Raises ModelError."""
    return _parse(_text_of(fields).with_defaults(DEFAULTS), prefix=WRAPPED_PREFIX)


def parse_unified(fields: ConfigFields) -> ModelSpec:
    """The spec of the text config of a 12B. Raises ModelError."""
    return _parse(fields.with_defaults(UNIFIED), prefix="model.")


def parse_wrapped_unified(fields: ConfigFields) -> ModelSpec:
    """The spec of the text part of a 12B. Raises ModelError."""
    return _parse(_text_of(fields).with_defaults(UNIFIED), prefix=WRAPPED_PREFIX)


def _text_of(fields: ConfigFields) -> ConfigFields:
    text = dict(fields.mapping("text_config"))
    for name in ("tie_word_embeddings", "eos_token_id"):
        if fields.config.get(name) is not None:
            text.setdefault(name, fields.config[name])
    return ConfigFields(text)


def _parse(fields: ConfigFields, *, prefix: str) -> ModelSpec:
    _refuse_what_is_not_computed(fields)
    # The last layer attends to all tokens, as in transformers.
    kinds = [*layer_kinds(fields, INTERVAL)[:-1], FULL]
    num_own = len(kinds) - _number(fields, "num_kv_shared_layers")
    lenders = _lenders(kinds, num_own)
    hidden_size = fields.positive("hidden_size")
    mixers = [
        replace(
            _attention(fields, layer, kind),
            keys="borrowed" if layer >= num_own else "lent" if layer in lenders else "own",
        )
        for layer, kind in enumerate(kinds)
    ]
    networks = [_feed_forward(fields, borrows=layer >= num_own) for layer in range(len(kinds))]
    pairs = zip(mixers, networks, strict=True)
    size = _number(fields, "hidden_size_per_layer_input")
    vocab_size = fields.positive("vocab_size_per_layer_input")
    return ModelSpec(
        family="gemma4",
        prefix=prefix,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(LayerSpec(mixer, network) for mixer, network in pairs),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=0.0,
        tied_embeddings=bool(fields.config["tie_word_embeddings"]),
        max_positions=fields.positive("max_position_embeddings"),
        eos_ids=fields.eos_ids(),
        embedding_scale=math.sqrt(hidden_size),
        logit_cap=fields.optional_number("final_logit_softcapping"),
        layer_inputs=LayerInputs(size, vocab_size) if size else None,
        uncut=tuple((lender, len(kinds)) for lender in sorted(lenders)),
        unread=frozenset(
            f"{prefix}layers.{layer}.self_attn.{name}.weight"
            for layer in range(num_own, len(kinds))
            for name in KEYS_AND_VALUES
        ),
    )


def _number(fields: ConfigFields, name: str) -> int:
    return 0 if fields.config.get(name) is None else fields.natural(name)


def _lenders(kinds: list[str], num_own: int) -> set[int]:
    """The layers whose keys and values are used by those after the first `num_own`: the last one of
    each kind that has its own. Raises ModelError."""
    if num_own == len(kinds):
        return set()
    last = {kind: layer for layer, kind in enumerate(kinds[: max(num_own, 0)])}
    if set(kinds[max(num_own, 0) :]) - last.keys():
        raise ModelError(
            f"num_kv_shared_layers = {len(kinds) - num_own}: no layer before them has keys for "
            f"all of {sorted(set(kinds))}"
        )
    return set(last.values())


def _feed_forward(fields: ConfigFields, *, borrows: bool) -> FeedForward:
    inner_size = fields.positive("intermediate_size")
    if borrows and fields.config.get("use_double_wide_mlp"):
        inner_size *= 2
    input_size = _number(fields, "hidden_size_per_layer_input")
    if not fields.config.get("enable_moe_block"):
        return GegluSpec(inner_size, scales_layer=True, input_size=input_size)
    num_experts, num_chosen = fields.positive("num_experts"), fields.positive("top_k_experts")
    if num_chosen > num_experts:
        raise ModelError(
            f"top_k_experts = {num_chosen}: expected at most num_experts = {num_experts}"
        )
    size = fields.positive("moe_intermediate_size")
    return GegluExpertsSpec(inner_size, num_experts, size, Routing(num_chosen), input_size)


def _refuse_what_is_not_computed(fields: ConfigFields) -> None:
    fields.must_be("hidden_activation", GELU)
    fields.must_be("attention_bias", False)
    # "vision" is about tokens of images.
    if fields.config.get("use_bidirectional_attention") != "vision":
        fields.must_be("use_bidirectional_attention", None)


def _attention(fields: ConfigFields, layer: int, kind: str) -> AttentionSpec:
    """The attention of a layer, whose scores are not scaled: queries are scaled to compensate for
    the division by the root of the head's size."""
    is_full = kind == FULL
    own = ConfigFields({**fields.config, **_own_sizes(fields, layer, kind)})
    rope = fields.mapping("rope_parameters").get(kind)
    own = own.with_rope(rope if isinstance(rope, Mapping) else ROPES[kind])
    attention = replace(
        parse_attention(own, gated=False, rotary_factor=1.0),
        query_scale=math.sqrt(own.positive("head_dim")),
        norms_output=True,
        norms_values=True,
        shares_keys=is_full and bool(fields.config.get("attention_k_eq_v", False)),
    )
    return attention if is_full else sliding(attention, fields.positive("sliding_window"))


def _own_sizes(fields: ConfigFields, layer: int, kind: str) -> Mapping[str, Any]:
    """A layer's own sizes: by layer, as transformers saves them, or in the form used on hubs."""
    saved = fields.config.get("per_layer_config")
    if isinstance(saved, Mapping):
        found = saved.get(str(layer), saved.get(kind, {}))
        if not isinstance(found, Mapping):
            raise ModelError(f"per_layer_config[{layer}] = {found!r}: expected a JSON object")
        return found
    if kind != FULL:
        return {}
    sizes = {"head_dim": fields.positive("global_head_dim", GLOBAL_HEAD_DIM)}
    num_kv_heads = fields.config.get("num_global_key_value_heads")
    if num_kv_heads is not None and fields.config.get("attention_k_eq_v"):
        sizes["num_key_value_heads"] = num_kv_heads
    return sizes


WRAPPED_PREFIX = "model.language_model."
CLASSES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
UNIFIED_CLASSES = ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration")
# By `model_type` of config.json.
FAMILIES: Mapping[str, Family] = {
    "gemma4": Family("gemma4", parse_wrapped, CLASSES),
    "gemma4_text": Family("gemma4", parse, CLASSES),
    "gemma4_unified": Family("gemma4", parse_wrapped_unified, UNIFIED_CLASSES),
    "gemma4_unified_text": Family("gemma4", parse_unified, UNIFIED_CLASSES),
}
