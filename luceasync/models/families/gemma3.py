"""Gemma 3: layers with windows, except that every sixth layer attends to all tokens; norms on both
sides of each half layer; a scaled embedding. Text only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from luceasync.errors import ModelError
from luceasync.models.families.dense import FULL, SLIDING, parse_attention, sliding
from luceasync.models.families.family import ConfigFields, Family
from luceasync.models.feed_forward.geglu import GegluSpec
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.spec import LayerSpec, ModelSpec

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
THETA = {FULL: 1000000.0, SLIDING: 10000.0}
GELU = "gelu_pytorch_tanh"


def parse(fields: ConfigFields) -> ModelSpec:
    """The spec of a text model's config. Raises ModelError."""
    return _parse(fields, prefix="model.")


def parse_wrapped(fields: ConfigFields) -> ModelSpec:
    """The spec of the text part of a vision model. Raises ModelError."""
    text = dict(fields.mapping("text_config"))
    for name in ("tie_word_embeddings", "eos_token_id"):
        if fields.config.get(name) is not None:
            text.setdefault(name, fields.config[name])
    return _parse(ConfigFields(text), prefix="language_model.model.")


def parse_gguf(fields: ConfigFields) -> ModelSpec:
    """The spec of a GGUF file, whose norms hold 1 + w. Raises ModelError."""
    return replace(_parse(fields, prefix="model."), norm_offset=0.0)


def _parse(fields: ConfigFields, *, prefix: str) -> ModelSpec:
    fields = fields.with_defaults(DEFAULTS)
    fields.must_be("hidden_activation", GELU)
    fields.must_be("attention_bias", False)
    fields.must_be("attn_logit_softcapping", None)
    fields.must_be("use_bidirectional_attention", False)
    kinds = layer_kinds(fields, fields.positive("sliding_window_pattern"))
    mixers = {kind: _attention(fields, kind) for kind in set(kinds)}
    if SLIDING in mixers:
        mixers[SLIDING] = sliding(mixers[SLIDING], fields.positive("sliding_window"))
    feed_forward = GegluSpec(fields.positive("intermediate_size"))
    hidden_size = fields.positive("hidden_size")
    return ModelSpec(
        family="gemma3",
        prefix=prefix,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(LayerSpec(mixers[kind], feed_forward) for kind in kinds),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        tied_embeddings=bool(fields.config["tie_word_embeddings"]),
        max_positions=fields.positive("max_position_embeddings"),
        eos_ids=fields.eos_ids(),
        embedding_scale=math.sqrt(hidden_size),
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


def layer_kinds(fields: ConfigFields, interval: int) -> list[str]:
    """The kind of each layer: as listed, or every `interval`-th attends to all tokens. Raises
    ModelError."""
    num_layers = fields.positive("num_hidden_layers")
    default = [FULL if (layer + 1) % interval == 0 else SLIDING for layer in range(num_layers)]
    listed = fields.config.get("layer_types") or default
    fits = isinstance(listed, list) and len(listed) == num_layers
    if not fits or not all(kind in (FULL, SLIDING) for kind in listed):
        raise ModelError(
            f"layer_types = {listed!r}: expected {num_layers} entries of {[FULL, SLIDING]}"
        )
    return listed


def _attention(fields: ConfigFields, kind: str) -> AttentionSpec:
    """The attention of layers of one kind. Scores are divided by the root of
    `query_pre_attn_scalar` instead of that of the head's size: queries are scaled to compensate."""
    own = fields.with_rope(rope_fields(fields, kind))
    attention = parse_attention(own, gated=False, rotary_factor=1.0)
    scalar = fields.number("query_pre_attn_scalar")
    return replace(
        attention,
        query_scale=math.sqrt(attention.head_dim / scalar),
        norms_output=True,
    )


def rope_fields(fields: ConfigFields, kind: str) -> Mapping[str, object]:
    """Rope of layers of one kind, from the fields of newer configs, or from the older top-level
    ones, where only layers that attend to all tokens are scaled."""
    nested = fields.mapping("rope_parameters").get(kind)
    rope = dict(nested) if isinstance(nested, Mapping) else {"rope_type": "default"}
    name = "rope_theta" if kind == FULL else "rope_local_base_freq"
    if kind == FULL:
        rope.update(fields.mapping("rope_scaling"))
    rope.setdefault("rope_theta", fields.config.get(name) or THETA[kind])
    return rope


CLASSES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
FAMILY = Family("gemma3", parse, CLASSES)
GGUF = Family("gemma3", parse_gguf, CLASSES)
WRAPPED = Family("gemma3", parse_wrapped, CLASSES)
