"""What a model family contributes; everything else is shared. Does not import torch at its top."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from luceasync.errors import ModelError, Unsupported
from luceasync.models.rope import (
    PLAIN,
    DividedRope,
    LinearRope,
    Llama3Rope,
    ProportionalRope,
    Rope,
    YarnRope,
    yarn_magnitude,
)
from luceasync.models.spec import ModelSpec

if TYPE_CHECKING:
    from luceasync.models.ends import ModelEnds
    from luceasync.models.loader import Layer, TensorReader


class ConfigFields:
    """Typed access to the fields of a config.json. A missing or invalid field is a ModelError that
    names it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigFields:
        """The same config, with values for fields that it does not have."""
        return ConfigFields({**defaults, **self.config})

    def with_rope(self, rope: Mapping[str, Any]) -> ConfigFields:
        """The same config with exactly these rope parameters."""
        others = ("rope_scaling", "rope_theta", "partial_rotary_factor")
        kept = {name: value for name, value in self.config.items() if name not in others}
        return ConfigFields({**kept, "rope_parameters": rope})

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name} = {value!r}: expected a positive integer")
        return value

    def natural(self, name: str) -> int:
        value = self.config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(f"{name} = {value!r}: expected an integer, 0 or more")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.config.get(name, default)
        if not _is_positive_number(value):
            raise ModelError(f"{name} = {value!r}: expected a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """None if the field is missing or null."""
        return None if self.config.get(name) is None else self.number(name)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{name} = {value!r}: expected a JSON object")
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
            raise ModelError(f"eos_token_id = {value!r}: expected an integer or a list of them")
        return frozenset(ids)

    def rope(self, layer_type: str = "full_attention") -> tuple[float, Rope]:
        """Theta and the rope of layers of `layer_type`, for configs with several kinds of
        layers."""
        own = self._rope_fields(layer_type)
        kind = own.config.get("rope_type", own.config.get("type", "default"))
        parse = ROPES.get(kind) if isinstance(kind, str) else None
        if parse is None:
            raise ModelError(f"rope_type {kind!r} is not supported; expected {', '.join(ROPES)}")
        return own.number("rope_theta", 10000.0), parse(own)

    def rotary_share(self, default: float) -> float:
        """The part of each head that is rotated."""
        return self._rope_fields("full_attention").number("partial_rotary_factor", default)

    def _rope_fields(self, layer_type: str) -> ConfigFields:
        """`rope_parameters` of current configs, or the older top-level fields. If both exist,
        `rope_scaling` wins, as in transformers."""
        rope = dict(self.mapping("rope_scaling") or self.mapping("rope_parameters"))
        if isinstance(nested := rope.get(layer_type), Mapping):
            rope = dict(nested)
        for name in ("rope_theta", "partial_rotary_factor"):
            if self.config.get(name) is not None:
                rope.setdefault(name, self.config[name])
        if self.config.get("original_max_position_embeddings") is not None:
            rope[ORIGINAL] = self.config[ORIGINAL]
        elif rope.get(ORIGINAL) is None:
            rope[ORIGINAL] = self.config.get("max_position_embeddings")
        own = ConfigFields(rope)
        for name in ("rope_theta", "partial_rotary_factor"):
            own.number(name, 1.0)
        return own


ORIGINAL = "original_max_position_embeddings"


def _divided_rope(rope: ConfigFields) -> DividedRope:
    """As described by the reader of a GGUF file; config.json files do not use it."""
    return DividedRope(tuple(rope.config["divisors"]))


def _linear_rope(rope: ConfigFields) -> LinearRope:
    return LinearRope(rope.number("factor"))


def _llama3_rope(rope: ConfigFields) -> Llama3Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ModelError(
            f"low_freq_factor = {low:g}: expected less than high_freq_factor = {high:g}"
        )
    return Llama3Rope(rope.number("factor"), low, high, rope.positive(ORIGINAL))


def _proportional_rope(rope: ConfigFields) -> ProportionalRope:
    share = rope.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise ModelError(f"partial_rotary_factor = {share:g}: expected at most 1")
    return ProportionalRope(share, rope.number("factor", 1.0))


def _yarn_rope(rope: ConfigFields) -> YarnRope:
    factor, original = rope.number("factor"), rope.positive(ORIGINAL)
    given = {name: rope.config.get(name) for name in ("mscale", "mscale_all_dim")}
    magnitude = yarn_magnitude(factor)
    if all(given.values()):
        scales = (yarn_magnitude(factor, rope.number(name)) for name in given)
        magnitude = next(scales) / next(scales)
    if rope.config.get("attention_factor") is not None:
        magnitude = rope.number("attention_factor")
    fast = 32.0 if rope.config.get("beta_fast") is None else rope.number("beta_fast")
    slow = 1.0 if rope.config.get("beta_slow") is None else rope.number("beta_slow")
    rounds = rope.config.get("truncate", True)
    return YarnRope(factor, original, fast, slow, magnitude, bool(rounds))


# By `rope_type`. Sections of "mrope" are for images: text is rotated as by the default.
ROPES: Mapping[str, Callable[[ConfigFields], Rope]] = {
    "default": lambda rope: PLAIN,
    "divided": _divided_rope,
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "mrope": lambda rope: PLAIN,
    "proportional": _proportional_rope,
    "yarn": _yarn_rope,
}


def _is_positive_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0


def read_layer(reader: TensorReader, layer: int) -> Layer:
    """Load a decoder layer: its mixer and its feed-forward network."""
    return reader.layer(layer)


def read_ends(reader: TensorReader, *, is_first: bool, is_last: bool) -> ModelEnds:
    """Load embedding, final norm and head, as far as the shard has them."""
    from luceasync.models import ends

    return ends.read_ends(reader, is_first=is_first, is_last=is_last)


def cannot_compress(spec: ModelSpec, tokens: Sequence[int], keep_ratio: float) -> list[int]:
    """Raises Unsupported."""
    raise Unsupported(f"prompt compression is not supported for models of family {spec.family}")


def architecture(spec: ModelSpec) -> dict[str, Any]:
    """All fields of the spec that a model's numbers depend on, as JSON. Models with equal fields
    and equal weights share saved state."""
    agreed = {
        name: getattr(spec, name)
        for name in (
            "family",
            "prefix",
            "vocab_size",
            "hidden_size",
            "norm_eps",
            "norm_offset",
            "tied_embeddings",
        )
    }
    layers = [_kinds(layer.mixer, layer.feed_forward) for layer in spec.layers]
    capped = {} if spec.logit_cap is None else {"logit_cap": spec.logit_cap}
    inputs = {} if spec.layer_inputs is None else {"layer_inputs": asdict(spec.layer_inputs)}
    return agreed | capped | inputs | suppressed_of(spec) | {"layers": layers}


def suppressed_of(spec: ModelSpec) -> dict[str, Any]:
    """The part of a namespace about tokens that are never chosen, since nodes keep logits."""
    return {"suppressed": spec.suppressed} if spec.suppressed else {}


def _kinds(*halves: Any) -> list[Any]:
    return [[type(half).__name__, sizes_of(half)] for half in halves]


def sizes_of(half: Any) -> dict[str, Any]:
    """The fields of half a layer as JSON, without those that have their default: adding a field to
    a kind of layer then changes no namespace."""
    stored = asdict(half)
    changed = [each.name for each in fields(half) if getattr(half, each.name) != each.default]
    return {name: stored[name] for name in changed}


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    `classes`: the `architectures` of a config that are language models of this family; empty: any.
    `parse` reads a config and raises ModelError. `architecture` lists the fields in which saved
    state must agree. `compress(spec, tokens, keep_ratio)` shortens a prompt before prefill, and
    raises Unsupported if the family cannot.
    """

    name: str
    parse: Callable[[ConfigFields], ModelSpec]
    classes: tuple[str, ...] = ()
    architecture: Callable[[ModelSpec], dict[str, Any]] = architecture
    read_layer: Callable[[TensorReader, int], Layer] = read_layer
    read_ends: Callable[..., ModelEnds] = read_ends
    compress: Callable[[ModelSpec, Sequence[int], float], list[int]] = cannot_compress
