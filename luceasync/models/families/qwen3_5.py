"""Qwen3.5, a hybrid: Gated DeltaNet layers with layers of gated attention in between. Text only."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from luceasync.errors import ModelError
from luceasync.models.families.dense import (
    attention_architecture,
    ends_architecture,
    only,
    parse_attention,
)
from luceasync.models.families.family import ConfigFields, Family
from luceasync.models.feed_forward.dense import DenseSpec
from luceasync.models.feed_forward.feed_forward import FeedForward
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.delta import DeltaSpec
from luceasync.models.spec import LayerSpec, ModelSpec

DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 32768}


WRAPPED_PREFIX = "model.language_model."


def parse(fields: ConfigFields) -> ModelSpec:
    """The spec of a text model's config. Raises ModelError."""
    return parse_text(fields, "qwen3_5", DenseSpec(fields.positive("intermediate_size")))


def parse_wrapped(fields: ConfigFields) -> ModelSpec:
    """The spec of the text part of a vision model. Raises ModelError."""
    return replace(parse(text_of(fields)), prefix=WRAPPED_PREFIX)


def parse_gguf(fields: ConfigFields) -> ModelSpec:
    """The spec of a GGUF file. Raises ModelError."""
    return as_in_gguf(parse(fields))


def text_of(fields: ConfigFields) -> ConfigFields:
    """The config of the text part of a vision model. Raises ModelError."""
    text = dict(fields.mapping("text_config"))
    text.setdefault("tie_word_embeddings", fields.config.get("tie_word_embeddings", False))
    text.setdefault("eos_token_id", fields.config.get("eos_token_id"))
    return ConfigFields(text)


def as_in_gguf(spec: ModelSpec) -> ModelSpec:
    """The model as a GGUF file stores it: norms hold 1 + w, and the decay rate is stored instead of
    its logarithm."""
    layers = [
        replace(layer, mixer=replace(layer.mixer, stores_decay_rate=True))
        if isinstance(layer.mixer, DeltaSpec)
        else layer
        for layer in spec.layers
    ]
    return replace(spec, norm_offset=0.0, layers=tuple(layers))


def parse_text(fields: ConfigFields, family: str, feed_forward: FeedForward) -> ModelSpec:
    """The spec of a text model of `family`, whose layers all have this `feed_forward`. Raises
    ModelError.
    """
    fields = fields.with_defaults(DEFAULTS)
    fields.must_be("hidden_act", "silu")
    delta = _parse_delta(fields)
    fields.must_be("attention_bias", False)
    share = fields.rotary_share(0.25)
    attention = parse_attention(fields, gated=True, rotary_factor=share)
    mixers = [attention if is_full else delta for is_full in _full_layers(fields)]
    return ModelSpec(
        family=family,
        prefix="model.",
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        layers=tuple(LayerSpec(mixer, feed_forward) for mixer in mixers),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        tied_embeddings=bool(fields.config.get("tie_word_embeddings", False)),
        max_positions=fields.positive("max_position_embeddings"),
        eos_ids=fields.eos_ids(),
        mtp=LayerSpec(attention, feed_forward) if _drafts(fields) else None,
    )


def _drafts(fields: ConfigFields) -> bool:
    """Whether the config has a drafting head of one layer that shares the model's embedding. Its
    proposals are verified, so other kinds of heads can be ignored."""
    has_own = fields.config.get("mtp_use_dedicated_embeddings")
    return fields.config.get("mtp_num_hidden_layers") == 1 and not has_own


def _parse_delta(fields: ConfigFields) -> DeltaSpec:
    delta = DeltaSpec(
        num_key_heads=fields.positive("linear_num_key_heads", 16),
        num_value_heads=fields.positive("linear_num_value_heads", 32),
        key_dim=fields.positive("linear_key_head_dim", 128),
        value_dim=fields.positive("linear_value_head_dim", 128),
        conv_kernel=fields.positive("linear_conv_kernel_dim", 4),
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise ModelError(
            f"linear_num_value_heads = {delta.num_value_heads} is not a multiple of "
            f"linear_num_key_heads = {delta.num_key_heads}"
        )
    return delta


def _full_layers(fields: ConfigFields) -> list[bool]:
    """For each layer, whether it is full attention."""
    num_layers = fields.positive("num_hidden_layers")
    names = {"full_attention": True, "linear_attention": False}
    interval = fields.positive("full_attention_interval", 4)
    default = [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(num_layers)
    ]
    listed = fields.config.get("layer_types") or default
    fits = isinstance(listed, list) and len(listed) == num_layers
    if not fits or not all(isinstance(name, str) and name in names for name in listed):
        raise ModelError(
            f"layer_types = {listed!r}: expected {num_layers} entries of {sorted(names)}"
        )
    return [names[name] for name in listed]


def architecture(spec: ModelSpec) -> dict[str, Any]:
    """Has the form that namespaces of prefix caches have had from the start."""
    attention, delta = only(spec, AttentionSpec), only(spec, DeltaSpec)
    names = {attention: "attention", delta: "delta"}
    sizes = asdict(delta)
    del sizes["stores_decay_rate"]  # follows from the files, which have their own digest
    return ends_architecture(spec) | {
        "attention": attention_architecture(spec),
        "delta": sizes,
        "layer_types": [names[mixer] for mixer in spec.mixers],
    }


CLASSES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
FAMILY = Family("qwen3_5", parse, CLASSES, architecture)
GGUF = Family("qwen3_5", parse_gguf, CLASSES, architecture)
WRAPPED = Family("qwen3_5", parse_wrapped, CLASSES, architecture)
