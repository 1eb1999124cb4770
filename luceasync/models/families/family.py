"""What a model family contributes; everything else is the same for all of them. Pure at its top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from luceasync.errors import Unsupported
from luceasync.models.config_fields import Fields
from luceasync.models.spec import ModelSpec

if TYPE_CHECKING:
    from luceasync.models.ends import Ends
    from luceasync.models.layers import Layer
    from luceasync.models.loader import TensorReader


def read_layer(reader: TensorReader, layer: int) -> Layer:
    """A decoder layer as its mixer and its feed-forward network load themselves."""
    return reader.layer(layer)


def read_ends(reader: TensorReader, *, is_first: bool, is_last: bool) -> Ends:
    """Embedding, final norm and head, as far as a shard has them."""
    from luceasync.models import ends

    return ends.read_ends(reader, is_first=is_first, is_last=is_last)


def cannot_compress(spec: ModelSpec, tokens: Sequence[int], keep_ratio: float) -> list[int]:
    """Raises Unsupported."""
    raise Unsupported(f"prompt compression is not supported for models of family {spec.family}")


def architecture(spec: ModelSpec) -> dict[str, Any]:
    """Everything in the spec that a model's numbers depend on, as JSON has it: saved state is
    shared where it agrees.
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
    """One family.

    `parse` reads a config and raises ModelError. `architecture` says in what saved state must
    agree. `compress(spec, tokens, keep_ratio)` shortens a prompt before prefill and raises
    Unsupported where the family cannot.
    """

    name: str
    parse: Callable[[Fields], ModelSpec]
    architecture: Callable[[ModelSpec], dict[str, Any]] = architecture
    read_layer: Callable[[TensorReader, int], Layer] = read_layer
    read_ends: Callable[..., Ends] = read_ends
    compress: Callable[[ModelSpec, Sequence[int], float], list[int]] = cannot_compress
