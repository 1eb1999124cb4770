"""What a model is: its dimensions, and for each layer a mixer and a feed-forward network.

Pure: no torch, no weights, no devices. Names neither a family nor a kind of layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from luceasync.models.feed_forward.feed_forward import FeedForward
from luceasync.models.mixers.mixer import Mixer

Shape = tuple[int, ...]
MTP = "mtp."  # prefix of the tensor names of the drafting head


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The two halves of a decoder layer."""

    mixer: Mixer
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """An input of `size` numbers for each layer, beside the residual stream, computed for each
    token from a table of `vocab_size` rows and from a projection of its embedding."""

    size: int
    vocab_size: int

    def shapes(self, num_layers: int, hidden_size: int) -> dict[str, Shape]:
        """Shapes of its tensors by their names below the model's prefix."""
        width = num_layers * self.size
        return {
            INPUT_TABLE: (self.vocab_size, width),
            INPUT_PROJECTION: (width, hidden_size),
            INPUT_NORM: (self.size,),
        }


INPUT_TABLE = "embed_tokens_per_layer.weight"
INPUT_PROJECTION = "per_layer_model_projection.weight"
INPUT_NORM = "per_layer_projection_norm.weight"


@dataclass(frozen=True, slots=True)
class EndNames:
    """Names of the tensors before the first layer and after the last, given by the family. The
    model's prefix precedes all but that of the head."""

    embedding: str = "embed_tokens.weight"
    norm: str = "norm.weight"
    head: str = "lm_head.weight"


MOST_ENDS = EndNames()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything about a model except its weights and where they live.

    `norm_offset` is added to the stored weights of RMS norms over the residual stream (Qwen3.5
    stores w of 1 + w). `prefix` precedes tensor names. `suppressed`: tokens that are never chosen.
    `embedding_scale` multiplies embedded tokens. If `logit_cap` is c, logits x become c tanh(x /
    c). `layer_inputs`: what layers read beside the residual stream. `uncut`: ranges of layers that
    must be on one device, because the first hands something to later ones. `unread`: names of
    tensors that checkpoints may have but that are not read. `mtp`: the layer of a drafting head
    (multi-token prediction), if the config has one; the weights may lack it.
    """

    family: str
    prefix: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_offset: float
    tied_embeddings: bool
    max_positions: int
    eos_ids: frozenset[int]
    end_names: EndNames = MOST_ENDS
    suppressed: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    layer_inputs: LayerInputs | None = None
    uncut: tuple[tuple[int, int], ...] = ()
    unread: frozenset[str] = frozenset()
    mtp: LayerSpec | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of each layer."""
        return tuple(layer.mixer for layer in self.layers)

    @property
    def has_end_state(self) -> bool:
        """Whether some layer has state that belongs to the newest token only. A sequence can then
        continue only from positions where that state was saved."""
        return any(mixer.end for mixer in self.mixers)

    @property
    def can_rerun(self) -> bool:
        """Whether another token may be run in place of the newest one."""
        return all(tensor.can_rerun for mixer in self.mixers for tensor in mixer.end)

    @property
    def sets_ends_aside(self) -> bool:
        """Whether the state within a prefill chunk can be saved, at its mark."""
        return all(tensor.has_spare for mixer in self.mixers for tensor in mixer.end)

    @property
    def end_kinds(self) -> frozenset[str]:
        """Snapshot names of tensors that belong to the newest token only."""
        return frozenset(tensor.name for mixer in self.mixers for tensor in mixer.end)

    @property
    def reach(self) -> int:
        """The largest `reach` of its mixers."""
        return max(mixer.reach for mixer in set(self.mixers))

    def layer_shapes(self, layer: int) -> dict[str, Shape]:
        """Shapes of a layer's tensors by their names below `layers.<layer>.`."""
        kinds, hidden = self.layers[layer], self.hidden_size
        return kinds.mixer.tensors(hidden) | kinds.feed_forward.tensors(hidden)

    @property
    def embedding_name(self) -> str:
        """The checkpoint name of the embedding."""
        return f"{self.prefix}{self.end_names.embedding}"

    def end_shapes(self, *, is_first: bool, is_last: bool) -> dict[str, Shape]:
        """Shapes of the ends' tensors by their checkpoint names, for a shard that has the first or
        the last layer. A tied head is the embedding.
        """
        table, names = (self.vocab_size, self.hidden_size), self.end_names
        shapes: dict[str, Shape] = {self.embedding_name: table} if is_first else {}
        if is_first and self.layer_inputs is not None:
            inputs = self.layer_inputs.shapes(self.num_layers, self.hidden_size)
            shapes |= {f"{self.prefix}{name}": shape for name, shape in inputs.items()}
        if is_last:
            shapes[f"{self.prefix}{names.norm}"] = (self.hidden_size,)
            shapes[self.embedding_name if self.tied_embeddings else names.head] = table
        return shapes

    def shapes(self) -> dict[str, Shape]:
        """Shapes of all tensors by their checkpoint names. A tied head has none."""
        return self.end_shapes(is_first=True, is_last=True) | {
            f"{self.prefix}layers.{layer}.{name}": shape
            for layer in range(self.num_layers)
            for name, shape in self.layer_shapes(layer).items()
        }

    def mtp_shapes(self) -> dict[str, Shape]:
        """Shapes of the tensors of the drafting head, by their checkpoint names; empty if there is
        none. It shares embedding and head with the model."""
        if self.mtp is None:
            return {}
        hidden, mixer, feed_forward = self.hidden_size, self.mtp.mixer, self.mtp.feed_forward
        layer = mixer.tensors(hidden) | feed_forward.tensors(hidden)
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        return {
            f"{MTP}fc.weight": (hidden, 2 * hidden),
            **{f"{MTP}{name}.weight": (hidden,) for name in norms},
            **{f"{MTP}layers.0.{name}": shape for name, shape in layer.items()},
        }

    def num_layer_parameters(self, layer: int) -> int:
        return sum(prod(shape) for shape in self.layer_shapes(layer).values())

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        if self.layer_inputs is not None:
            inputs = self.layer_inputs.shapes(self.num_layers, self.hidden_size)
            embeddings += sum(map(prod, inputs.values()))
        layers = sum(self.num_layer_parameters(layer) for layer in range(self.num_layers))
        return embeddings + self.hidden_size + layers
