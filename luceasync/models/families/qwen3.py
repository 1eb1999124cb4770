"""Qwen3, dense: attention with head norms, and SwiGLU, in every layer."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, TypeVar

from luceasync.errors import ModelError
from luceasync.models.families.family import ConfigFields, Family
from luceasync.models.feed_forward.dense import DenseSpec
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.spec import LayerSpec, ModelSpec

T = TypeVar("T")
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768}


def parse(fields: ConfigFields) -> ModelSpec:
    """The spec of a config. Raises ModelError."""
    return parse_dense(fields.with_defaults(DEFAULTS), "qwen3", has_head_norms=True)


def parse_dense(fields: ConfigFields, family: str, *, has_head_norms: bool) -> ModelSpec:
    """The spec of a `family` whose layers are all alike. They rotate whole heads, whatever
    `partial_rotary_factor` says, as in transformers. Raises ModelError.
    """
    fields.must_be("hidden_act", "silu")
    fields.must_be("use_sliding_window", False)
    num_layers = fields.positive("num_hidden_layers")
    fields.must_be("layer_types", ["full_attention"] * num_layers)
    feed_forward = DenseSpec(fields.positive("intermediate_size"))
    attention = parse_attention(fields, gated=False, rotary_factor=1.0)
    layer = LayerSpec(replace(attention, has_head_norms=has_head_norms), feed_forward)
    return ModelSpec(
        family=family,
        prefix="model.",
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        layers=(layer,) * num_layers,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=0.0,
        tied_embeddings=bool(fields.config.get("tie_word_embeddings", False)),
        max_positions=fields.positive("max_position_embeddings"),
        eos_ids=fields.eos_ids(),
    )


def parse_attention(fields: ConfigFields, *, gated: bool, rotary_factor: float) -> AttentionSpec:
    """The attention of a config. `rotary_factor`: the rotated part of each head. Raises
    ModelError.
    """
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    fields.must_be("attention_bias", False)
    rope = fields.rope()
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // num_heads)
    rotary_dim = int(head_dim * rotary_factor)
    if rotary_dim > head_dim or rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"partial_rotary_factor = {rotary_factor:g} rotates {rotary_dim} of head_dim = "
            f"{head_dim}; expected an even number of at least 2"
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        gated=gated,
    )


def architecture(spec: ModelSpec) -> dict[str, Any]:
    """In the shape that namespaces of prefix caches have had from the start."""
    return ends_architecture(spec) | {
        "attention": attention_architecture(spec),
        "delta": None,
        "layer_types": ["attention"] * spec.num_layers,
    }


def attention_architecture(spec: ModelSpec) -> dict[str, Any]:
    """The sizes of the one attention of all layers. Head norms follow from the family."""
    sizes = asdict(only(spec, AttentionSpec))
    del sizes["has_head_norms"]
    return sizes


def only(spec: ModelSpec, kind: type[T]) -> T:
    """The mixer of `kind`, which is the same in all layers that have one."""
    [mixer] = {mixer for mixer in spec.mixers if isinstance(mixer, kind)}
    return mixer


def ends_architecture(spec: ModelSpec) -> dict[str, Any]:
    """All fields that are not about one kind of mixer."""
    feed_forward = spec.layers[0].feed_forward
    assert isinstance(feed_forward, DenseSpec)
    return {
        "family": spec.family,
        "prefix": spec.prefix,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": feed_forward.inner_size,
        "norm_eps": spec.norm_eps,
        "norm_offset": spec.norm_offset,
        "tied_embeddings": spec.tied_embeddings,
    }


FAMILY = Family("qwen3", parse, ("Qwen3ForCausalLM",), architecture)
