"""What a model is, read from its config.json: dimensions, layer types, the shape of every tensor.

Pure: no torch, no weights, no devices. A config that we cannot run exactly is refused here, in
words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from luceasync.errors import ModelError

LayerType = Literal["attention", "delta"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention. `rotary_dim` of each head's `head_dim` are rotated; `gated`: the
    output is multiplied by sigmoid(gate), and q_proj holds query and gate of each head side by
    side.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gated: bool

    @property
    def query_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated DeltaNet (Yang et al., 2024): key heads are shared by groups of value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def output_dim(self) -> int:
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything about a model except its weights and where they will live.

    `norm_offset` is what is added to the stored weight of the RMS norms (Qwen3.5 stores w of 1 +
    w); the norm inside Gated DeltaNet is stored whole in every family. `prefix` precedes tensor
    names.
    """

    family: str
    prefix: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    norm_eps: float
    norm_offset: float
    attention: AttentionSpec
    delta: DeltaSpec | None
    tied_embeddings: bool
    max_positions: int
    eos_ids: frozenset[int]

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    def layer_shapes(self, layer: int) -> dict[str, Shape]:
        """Names below `layers.<layer>.` in the checkpoint and their shapes."""
        hidden, inner = self.hidden_size, self.intermediate_size
        if self.layer_types[layer] == "attention":
            mixer = {f"self_attn.{n}": s for n, s in _attention_shapes(self).items()}
        else:
            mixer = {f"linear_attn.{n}": s for n, s in _delta_shapes(self).items()}
        return mixer | {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }

    def num_layer_parameters(self, layer: int) -> int:
        return sum(prod(shape) for shape in self.layer_shapes(layer).values())

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        layers = sum(self.num_layer_parameters(layer) for layer in range(self.num_layers))
        return embeddings + self.hidden_size + layers


def _attention_shapes(spec: ModelSpec) -> dict[str, Shape]:
    attention, hidden = spec.attention, spec.hidden_size
    return {
        "q_proj.weight": (attention.query_dim * (2 if attention.gated else 1), hidden),
        "k_proj.weight": (attention.kv_dim, hidden),
        "v_proj.weight": (attention.kv_dim, hidden),
        "o_proj.weight": (hidden, attention.query_dim),
        "q_norm.weight": (attention.head_dim,),
        "k_norm.weight": (attention.head_dim,),
    }


def _delta_shapes(spec: ModelSpec) -> dict[str, Shape]:
    delta, hidden = spec.delta, spec.hidden_size
    assert delta is not None
    return {
        "in_proj_qkv.weight": (delta.conv_channels, hidden),
        "in_proj_z.weight": (delta.output_dim, hidden),
        "in_proj_b.weight": (delta.num_value_heads, hidden),
        "in_proj_a.weight": (delta.num_value_heads, hidden),
        "conv1d.weight": (delta.conv_channels, 1, delta.conv_kernel),
        "A_log": (delta.num_value_heads,),
        "dt_bias": (delta.num_value_heads,),
        "norm.weight": (delta.value_dim,),
        "out_proj.weight": (hidden, delta.output_dim),
    }


# --- reading config.json ------------------------------------------------------------------------


def read_spec(model_dir: Path) -> ModelSpec:
    """The spec of the model in `model_dir`. Raises ModelError naming the file and the field."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{model_dir}: no config.json; a Hugging Face model directory is expected"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: a JSON object is expected, got {type(config).__name__}")
    try:
        return parse_spec(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def parse_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec that a parsed config.json describes. Raises ModelError."""
    model_type = config.get("model_type")
    match model_type:
        case "qwen3":
            return _parse_qwen3(_Fields(config))
        case "qwen3_5_text":
            return _parse_qwen3_5(_Fields(config), prefix="model.")
        case "qwen3_5":  # the vision wrapper: its text part only
            text = dict(_Fields(config).mapping("text_config"))
            text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
            text.setdefault("eos_token_id", config.get("eos_token_id"))
            return _parse_qwen3_5(_Fields(text), prefix="model.language_model.")
    raise ModelError(
        f"model_type {model_type!r} is not supported; supported: qwen3, qwen3_5, qwen3_5_text"
    )


class _Fields:
    """Typed access to a config; a missing or misfitting field is a ModelError that names it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name} = {value!r}: a positive integer is expected")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if not _is_positive_number(value):
            raise ModelError(f"{name} = {value!r}: a positive number is expected")
        return float(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{name} = {value!r}: a JSON object is expected")
        return value

    def must_be(self, name: str, expected: object) -> None:
        value = self.config.get(name)
        value = expected if value is None else value
        if value != expected:
            raise ModelError(f"{name} = {value!r} is not supported; expected {expected!r}")

    def eos_ids(self) -> frozenset[int]:
        value = self.config.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(i) is int for i in ids):
            raise ModelError(f"eos_token_id = {value!r}: an integer or a list of them is expected")
        return frozenset(ids)

    def rope(self) -> Mapping[str, Any]:
        """`rope_parameters` of today's configs, or the older fields of the top level. Where both
        are there, transformers follows `rope_scaling`.
        """
        rope = dict(self.mapping("rope_scaling") or self.mapping("rope_parameters"))
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "mrope"):
            raise ModelError(f"rope_type {rope_type!r} is not supported; expected 'default'")
        for name in ("rope_theta", "partial_rotary_factor"):
            if self.config.get(name) is not None:
                rope.setdefault(name, self.config[name])
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope and not _is_positive_number(rope[name]):
                raise ModelError(f"{name} = {rope[name]!r}: a positive number is expected")
        return rope


def _is_positive_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _parse_attention(fields: _Fields, *, gated: bool, rotary_factor: float) -> AttentionSpec:
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    fields.must_be("attention_bias", False)
    fields.must_be("quantization_config", None)
    rope = fields.rope()
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // num_heads)
    factor = float(rope.get("partial_rotary_factor", rotary_factor))
    rotary_dim = int(head_dim * factor)
    if rotary_dim > head_dim or rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"partial_rotary_factor = {factor:g} rotates {rotary_dim} of head_dim = {head_dim}; "
            "an even number of them is expected"
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        gated=gated,
    )


def _parse_qwen3(fields: _Fields) -> ModelSpec:
    fields.must_be("hidden_act", "silu")
    fields.must_be("use_sliding_window", False)
    num_layers = fields.positive("num_hidden_layers")
    fields.must_be("layer_types", ["full_attention"] * num_layers)
    return ModelSpec(
        family="qwen3",
        prefix="model.",
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        intermediate_size=fields.positive("intermediate_size"),
        layer_types=("attention",) * num_layers,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=0.0,
        attention=_parse_attention(fields, gated=False, rotary_factor=1.0),
        delta=None,
        tied_embeddings=bool(fields.config.get("tie_word_embeddings", False)),
        max_positions=fields.positive("max_position_embeddings", 32768),
        eos_ids=fields.eos_ids(),
    )


def _parse_layer_types(fields: _Fields) -> tuple[LayerType, ...]:
    num_layers = fields.positive("num_hidden_layers")
    names: dict[str, LayerType] = {"full_attention": "attention", "linear_attention": "delta"}
    interval = fields.positive("full_attention_interval", 4)
    default = [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(num_layers)
    ]
    listed = fields.config.get("layer_types") or default
    fits = isinstance(listed, list) and len(listed) == num_layers
    if not fits or not all(isinstance(name, str) and name in names for name in listed):
        raise ModelError(
            f"layer_types = {listed!r}: {num_layers} entries of {sorted(names)} are expected"
        )
    return tuple(names[name] for name in listed)


def _parse_qwen3_5(fields: _Fields, *, prefix: str) -> ModelSpec:
    fields.must_be("hidden_act", "silu")
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
    return ModelSpec(
        family="qwen3_5",
        prefix=prefix,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        intermediate_size=fields.positive("intermediate_size"),
        layer_types=_parse_layer_types(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        attention=_parse_attention(fields, gated=True, rotary_factor=0.25),
        delta=delta,
        tied_embeddings=bool(fields.config.get("tie_word_embeddings", False)),
        max_positions=fields.positive("max_position_embeddings", 32768),
        eos_ids=fields.eos_ids(),
    )
