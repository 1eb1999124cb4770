"""Dense decoders: attention and SwiGLU in every layer. Llama, Mistral, Ministral, Qwen2, Qwen3 and
SmolLM3 differ in head norms, biases, defaults and in which layers rotate or see a window only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any, TypeVar

from luceasync.errors import ModelError
from luceasync.models.families.family import ConfigFields, Family, sizes_of, suppressed_of
from luceasync.models.families.family import architecture as layered_architecture
from luceasync.models.feed_forward.dense import DenseSpec
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.sliding import SlidingSpec
from luceasync.models.rope import NoRope
from luceasync.models.spec import LayerSpec, ModelSpec

T = TypeVar("T")
FULL, SLIDING = "full_attention", "sliding_attention"
# Defaults of transformers for fields that a config leaves out.
LLAMA_DEFAULTS = {"max_position_embeddings": 2048}
MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
QWEN2_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN3_DEFAULTS = QWEN2_DEFAULTS | {"head_dim": 128}
SMOLLM3_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
}


def parse_llama(fields: ConfigFields) -> ModelSpec:
    """The spec of a Llama's config. Raises ModelError."""
    fields.must_be("mlp_bias", False)
    fields.must_be("attention_bias", False)
    return parse_dense(fields.with_defaults(LLAMA_DEFAULTS), "llama")


def parse_mistral(fields: ConfigFields) -> ModelSpec:
    """The spec of a Mistral's config, all of whose layers have its window. Raises ModelError."""
    fields = fields.with_defaults(MISTRAL_DEFAULTS)
    return parse_dense(fields, "mistral", windows=_windows(fields, [SLIDING] * _num_layers(fields)))


def parse_ministral(fields: ConfigFields) -> ModelSpec:
    """The spec of a Ministral's config, whose window applies to the layers that are named so, or to
    all. Raises ModelError."""
    fields = fields.with_defaults(MISTRAL_DEFAULTS)
    windows = _windows(fields, [SLIDING] * _num_layers(fields))
    return parse_dense(fields, "ministral", windows=windows)


def parse_qwen2(fields: ConfigFields) -> ModelSpec:
    """The spec of a Qwen2's config, whose queries, keys and values have biases. Raises
    ModelError.
    """
    fields = fields.with_defaults(QWEN2_DEFAULTS)
    return parse_dense(fields, "qwen2", has_bias=True, windows=_upper_windows(fields))


def parse_qwen3(fields: ConfigFields) -> ModelSpec:
    """The spec of a Qwen3's config. Raises ModelError."""
    fields.must_be("attention_bias", False)
    fields = fields.with_defaults(QWEN3_DEFAULTS)
    return parse_dense(fields, "qwen3", has_head_norms=True, windows=_upper_windows(fields))


def parse_smollm3(fields: ConfigFields) -> ModelSpec:
    """The spec of a SmolLM3's config, some of whose layers do not rotate. Raises ModelError."""
    fields.must_be("mlp_bias", False)
    fields.must_be("attention_bias", False)
    fields = fields.with_defaults(SMOLLM3_DEFAULTS)
    rotating = _rotating_layers(fields)
    windows: list[int | None] = []
    if fields.config.get("use_sliding_window"):
        windows = _windows(fields, [FULL if rotates else SLIDING for rotates in rotating])
    return parse_dense(fields, "smollm3", rotating=rotating, windows=windows)


def _num_layers(fields: ConfigFields) -> int:
    return fields.positive("num_hidden_layers")


def _upper_windows(fields: ConfigFields) -> list[int | None]:
    """The window of each layer of a Qwen: if windows are used, from `max_window_layers` on."""
    if not fields.config.get("use_sliding_window"):
        return []
    num_layers = _num_layers(fields)
    num_full = min(fields.natural("max_window_layers"), num_layers)
    return _windows(fields, [FULL] * num_full + [SLIDING] * (num_layers - num_full))


def _windows(fields: ConfigFields, default: Sequence[str]) -> list[int | None]:
    """The window of each layer, by `layer_types` or the `default` kinds; empty: no layer has one.
    Raises ModelError.
    """
    if fields.config.get("sliding_window") is None:
        return []
    listed = fields.config.get("layer_types")
    kinds = default if listed is None else listed
    fits = isinstance(kinds, Sequence) and len(kinds) == len(default)
    if not fits or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise ModelError(
            f"layer_types = {listed!r}: expected {len(default)} entries of {[FULL, SLIDING]}"
        )
    if SLIDING not in kinds:
        return []
    window = fields.positive("sliding_window")
    return [window if kind == SLIDING else None for kind in kinds]


def _rotating_layers(fields: ConfigFields) -> list[bool]:
    """Which layers of a SmolLM3 rotate: listed by 1 and 0, or all but the last of each interval."""
    num_layers = fields.positive("num_hidden_layers")
    listed = fields.config.get("no_rope_layers")
    if listed is None:
        interval = fields.positive("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or any(flag not in (0, 1) for flag in listed):
        raise ModelError(f"no_rope_layers = {listed!r}: expected a list of 0 and 1")
    if len(listed) < num_layers:
        raise ModelError(f"no_rope_layers = {listed!r}: expected {num_layers} entries")
    return [bool(flag) for flag in listed[:num_layers]]


def parse_dense(
    fields: ConfigFields,
    family: str,
    *,
    has_head_norms: bool = False,
    has_bias: bool = False,
    rotating: Sequence[bool] = (),
    windows: Sequence[int | None] = (),
) -> ModelSpec:
    """The spec of a `family` whose layers are all alike, except that some may not be `rotating`,
    and some may have `windows`. They rotate whole heads and ignore `partial_rotary_factor`, as
    transformers does. Raises ModelError."""
    fields.must_be("hidden_act", "silu")
    num_layers = _num_layers(fields)
    if not windows:
        fields.must_be("layer_types", [FULL] * num_layers)
    feed_forward = DenseSpec(fields.positive("intermediate_size"))
    attention = parse_attention(fields, gated=False, rotary_factor=1.0)
    attention = replace(attention, has_head_norms=has_head_norms, has_bias=has_bias)
    still = replace(attention, rope=NoRope())
    whole = [attention if rotates else still for rotates in rotating or [True] * num_layers]
    pairs = zip(whole, windows or [None] * num_layers, strict=True)
    mixers = [mixer if window is None else sliding(mixer, window) for mixer, window in pairs]
    return ModelSpec(
        family=family,
        prefix="model.",
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        layers=tuple(LayerSpec(mixer, feed_forward) for mixer in mixers),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=0.0,
        tied_embeddings=bool(fields.config.get("tie_word_embeddings", False)),
        max_positions=fields.positive("max_position_embeddings"),
        eos_ids=fields.eos_ids(),
    )


def sliding(attention: AttentionSpec, window: int) -> SlidingSpec:
    """The same attention to a window."""
    sizes = {each.name: getattr(attention, each.name) for each in dataclass_fields(attention)}
    return SlidingSpec(**sizes | {"window": window})


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
    fields.must_be("is_causal", True)
    theta, rope = fields.rope()
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
        rope_theta=theta,
        gated=gated,
        rope=rope,
    )


def architecture(spec: ModelSpec) -> dict[str, Any]:
    """Without windows, has the form that namespaces of prefix caches have had from the start."""
    if any(isinstance(mixer, SlidingSpec) for mixer in spec.mixers):
        return layered_architecture(spec)
    return ends_architecture(spec) | {
        "attention": attention_architecture(spec),
        "delta": None,
        "layer_types": ["attention"] * spec.num_layers,
    }


# Fields of AttentionSpec that are always part of a namespace; others are if they differ from their
# default. Head norms follow from the family.
ALWAYS = ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "rope_theta", "gated")


def attention_architecture(spec: ModelSpec) -> dict[str, Any]:
    """The sizes of the one attention of all layers."""
    attention = only(spec, AttentionSpec)
    sizes = sizes_of(attention) | {name: getattr(attention, name) for name in ALWAYS}
    sizes.pop("has_head_norms", None)
    return sizes


def only(spec: ModelSpec, kind: type[T]) -> T:
    """The mixer of `kind`, which is the same in all layers that have such a mixer."""
    [mixer] = {mixer for mixer in spec.mixers if isinstance(mixer, kind)}
    return mixer


def ends_architecture(spec: ModelSpec) -> dict[str, Any]:
    """All fields that do not belong to one kind of mixer."""
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
        **suppressed_of(spec),
    }


# By `model_type` of config.json.
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", parse_llama, ("LlamaForCausalLM",), architecture),
    "ministral": Family("ministral", parse_ministral, ("MinistralForCausalLM",)),
    "mistral": Family("mistral", parse_mistral, ("MistralForCausalLM",)),
    "qwen2": Family("qwen2", parse_qwen2, ("Qwen2ForCausalLM",)),
    "qwen3": Family("qwen3", parse_qwen3, ("Qwen3ForCausalLM",), architecture),
    "smollm3": Family("smollm3", parse_smollm3, ("SmolLM3ForCausalLM",)),
}
