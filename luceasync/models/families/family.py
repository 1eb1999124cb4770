"""What a model family contributes; all else is common. Imports no torch at its top."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from luceasync.errors import ModelError, Unsupported
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

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name} = {value!r}: expected a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if not _is_positive_number(value):
            raise ModelError(f"{name} = {value!r}: expected a positive number")
        return float(value)

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

    def rope(self) -> Mapping[str, Any]:
        """`rope_parameters` of current configs, or the older top-level fields. If there are both,
        `rope_scaling` wins, as in transformers.
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
                raise ModelError(f"{name} = {rope[name]!r}: expected a positive number")
        return rope


def _is_positive_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0


def read_layer(reader: TensorReader, layer: int) -> Layer:
    """Load a decoder layer: its mixer and its feed-forward network."""
    return reader.layer(layer)


def read_ends(reader: TensorReader, *, is_first: bool, is_last: bool) -> ModelEnds:
    """Load embedding, final norm and head, as far as a shard has them."""
    from luceasync.models import ends

    return ends.read_ends(reader, is_first=is_first, is_last=is_last)


def cannot_compress(spec: ModelSpec, tokens: Sequence[int], keep_ratio: float) -> list[int]:
    """Raises Unsupported."""
    raise Unsupported(f"prompt compression is not supported for models of family {spec.family}")


def architecture(spec: ModelSpec) -> dict[str, Any]:
    """All fields of the spec that a model's numbers depend on, as JSON. Models that agree in them,
    and in their weights, share saved state.
    """
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
    return agreed | {"layers": [_kinds(layer.mixer, layer.feed_forward) for layer in spec.layers]}


def _kinds(*halves: Any) -> list[Any]:
    return [[type(half).__name__, asdict(half)] for half in halves]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    `classes`: the `architectures` of a config that are language models of this family; empty: any.
    `parse` reads a config and raises ModelError. `architecture` lists what saved state must agree
    in. `compress(spec, tokens, keep_ratio)` shortens a prompt before prefill, and raises
    Unsupported if the family cannot.
    """

    name: str
    parse: Callable[[ConfigFields], ModelSpec]
    classes: tuple[str, ...] = ()
    architecture: Callable[[ModelSpec], dict[str, Any]] = architecture
    read_layer: Callable[[TensorReader, int], Layer] = read_layer
    read_ends: Callable[..., ModelEnds] = read_ends
    compress: Callable[[ModelSpec, Sequence[int], float], list[int]] = cannot_compress
