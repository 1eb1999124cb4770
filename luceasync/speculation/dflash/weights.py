"""A drafter's weights, and their layout in the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.models.encodings import DenseEncoding, WeightPlacement
from luceasync.models.feed_forward.dense import DenseLayer
from luceasync.models.layer_reader import TensorPart, whole
from luceasync.models.loader import TensorSource, read_stacked
from luceasync.models.ops import Norm, TorchOps
from luceasync.models.weights import EmbeddingTable, Weight
from luceasync.speculation.dflash.dflash2 import (
    BlockConvolution,
    CandidateSelector,
    LayerConvolutions,
)
from luceasync.speculation.dflash.draft_files import DraftFiles
from luceasync.speculation.dflash.draft_spec import (
    GATE,
    MASK_EMBEDDING,
    DraftSpec,
    aux_norm,
    convolution_names,
)


@dataclass(frozen=True, slots=True)
class DraftLayerWeights:
    """projection: query, key, value rows stacked; head_norms float32 [heads + kv_heads, head_dim],
    of query heads, then of key heads.
    """

    norm: Norm
    projection: Weight
    head_norms: Tensor
    output: Weight
    feed_forward: DenseLayer
    gate: Weight | None = None
    convolutions: LayerConvolutions | None = None

    @property
    def num_bytes(self) -> int:
        parts = (self.norm, self.projection, self.output, self.feed_forward)
        others = (part for part in (self.gate, self.convolutions) if part is not None)
        return self.head_norms.nbytes + sum(part.num_bytes for part in (*parts, *others))


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """All weights on one device, plain matrices in one dtype, norms float32.

    fc [hidden, taps * hidden]; context_kv [layers * 2 * kv_dim, hidden], the key and value rows of
    layer 0, then those of layer 1, ...: context becomes the rows of all layers in one product;
    key_norms [layers, head_dim]. `mask_embedding` [hidden] or None: the target's row of the mask
    token. Matrices but a plain fc are packed for the operations that use them. `tap_norms`
    [taps, hidden], those of features. `context_norm`: without a weight, the norm of all layers,
    whose weights are in the columns of context_kv.
    """

    fc: Weight
    hidden_norm: Norm
    context_kv: Weight
    key_norms: Tensor
    norm: Tensor
    mask_embedding: Tensor | None
    layers: list[DraftLayerWeights]
    tap_norms: Tensor | None = None
    context_norm: Norm | None = None

    @property
    def num_bytes(self) -> int:
        tensors = self.fc.num_bytes + self.key_norms.nbytes + self.norm.nbytes
        ends = self.hidden_norm.num_bytes + self.context_kv.num_bytes
        if self.tap_norms is not None and self.context_norm is not None:
            ends += self.tap_norms.nbytes + self.context_norm.num_bytes
        return tensors + ends + sum(layer.num_bytes for layer in self.layers)

    def read(self, features: Tensor) -> Tensor:
        """Features [..., taps * hidden], of any float dtype, as `fc` takes them."""
        if self.tap_norms is None:
            return features.to(self.fc.dtype)
        rows = features.unflatten(-1, self.tap_norms.shape).float()
        normed = F.rms_norm(rows, rows.shape[-1:], None, self.hidden_norm.eps)
        return (normed * self.tap_norms).flatten(-2).to(self.fc.dtype)


def read_weights(
    spec: DraftSpec,
    source: TensorSource,
    place: WeightPlacement,
    *,
    has_mask_embedding: bool = False,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> DraftWeights:
    """Read all tensors to their place; `advance` hears the bytes of each. Raises ModelError."""
    reader = _Reader(spec, source, place, advance)
    projections = [
        f"layers.{layer}.self_attn.{name}_proj.weight"
        for layer in range(spec.num_layers)
        for name in "kv"
    ]
    key_norms = [f"layers.{layer}.self_attn.k_norm.weight" for layer in range(spec.num_layers)]
    tap_norms, context_norm = None, None
    if spec.norms_context:
        norms = [f"layers.{layer}.input_layernorm.weight" for layer in range(spec.num_layers)]
        by_layer = torch.stack([reader.vector(name) for name in norms])[:, None]
        rows = torch.cat([reader.plain(name) for name in projections])
        scaled = rows.view(spec.num_layers, -1, spec.hidden_size).float() * by_layer
        context_kv = place.ops.pack(scaled.flatten(0, 1).to(place.dtype))
        tap_norms = torch.stack([reader.vector(aux_norm(tap)) for tap in range(len(spec.taps))])
        weight = torch.ones(spec.hidden_size, device=place.device)
        context_norm = Norm(place.ops, weight, spec.norm_eps)
    else:
        context_kv = reader.matrix(*projections)
    weights = DraftWeights(
        fc=reader.projection("fc.weight"),
        hidden_norm=reader.norm("hidden_norm.weight"),
        context_kv=context_kv,
        key_norms=torch.stack([reader.vector(name) for name in key_norms]),
        norm=reader.vector("norm.weight"),
        mask_embedding=reader.vector(MASK_EMBEDDING).to(place.dtype)
        if has_mask_embedding
        else None,
        layers=[_read_layer(spec, reader, layer) for layer in range(spec.num_layers)],
        tap_norms=tap_norms,
        context_norm=context_norm,
    )
    place.findings.raise_fault()
    return weights


def _read_layer(spec: DraftSpec, reader: _Reader, layer: int) -> DraftLayerWeights:
    prefix, ops = f"layers.{layer}.", reader.place.ops
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    projections = [f"{attention}{name}_proj.weight" for name in "qkv"]
    return DraftLayerWeights(
        norm=reader.norm(prefix + "input_layernorm.weight"),
        projection=reader.matrix(*projections),
        head_norms=torch.cat(
            [
                reader.vector(attention + "q_norm.weight").expand(spec.attention.num_heads, -1),
                reader.vector(attention + "k_norm.weight").expand(spec.attention.num_kv_heads, -1),
            ]
        ),
        output=reader.matrix(attention + "o_proj.weight"),
        feed_forward=DenseLayer(
            norm=reader.norm(prefix + "post_attention_layernorm.weight"),
            network=ops.gated(
                reader.matrix(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                reader.matrix(mlp + "down_proj.weight"),
            ),
        ),
        gate=reader.matrix(prefix + GATE) if spec.gate else None,
        convolutions=_read_convolutions(reader, layer) if spec.convolution else None,
    )


def _read_convolutions(reader: _Reader, layer: int) -> LayerConvolutions:
    def read(half: Literal["attention", "mlp"]) -> BlockConvolution:
        base, dynamic = convolution_names(layer, half)
        return BlockConvolution(reader.plain(base), reader.matrix(dynamic))

    return LayerConvolutions(read("attention"), read("mlp"))


def read_selector(
    files: DraftFiles, spec: DraftSpec, place: WeightPlacement
) -> CandidateSelector | None:
    """What chooses the tokens of a drafter, on any device; None: it has nothing of the kind. Raises
    ModelError.
    """
    if spec.selector is None:
        return None
    with files.open(spec) as source:
        reader = _Reader(spec, source, place, lambda num_bytes: None)
        projection, predecessors, successors = spec.selector_shapes
        selector = CandidateSelector(
            spec.selector,
            reader.table(predecessors),
            reader.table(successors),
            reader.matrix(projection),
            place.device,
        )
        place.findings.raise_fault()
    return selector


class _Reader:
    """Reads tensors of the spec's shapes to their place."""

    def __init__(
        self,
        spec: DraftSpec,
        source: TensorSource,
        place: WeightPlacement,
        advance: Callable[[int], None],
    ) -> None:
        self.place = place
        self._spec = spec
        self._shapes = spec.shapes | spec.selector_shapes
        self._source = source
        self._advance = advance

    def matrix(self, *names: str) -> Weight:
        """The matrices `names` stacked along their rows."""
        parts = [TensorPart(name) for name in names]
        return read_stacked(self._source, parts, self._shapes, self.place, self._advance)

    def projection(self, name: str) -> Weight:
        """A matrix whose products are torch's own if it is plain."""
        if self._is_plain(name):
            return TorchOps().pack(self.plain(name))
        return self.matrix(name)

    def table(self, name: str) -> EmbeddingTable:
        """A matrix whose rows are looked up."""
        shape = self._shapes[name]
        stack = self._source.encoding(name).stack(shape, self.place)
        self._advance(stack.fill(0, self._source.stored(name, shape), whole))
        return stack.table()

    def norm(self, name: str) -> Norm:
        return Norm(self.place.ops, self.vector(name), self._spec.norm_eps)

    def vector(self, name: str) -> Tensor:
        """A small tensor in float32."""
        return self._read(name).to(self.place.device, torch.float32)

    def plain(self, name: str) -> Tensor:
        """A tensor that must not be quantised, in the dtype of matrices."""
        if not self._is_plain(name):
            raise ModelError(f"{name!r} is quantised, which is not supported in this drafter")
        return self._read(name).to(self.place.device, self.place.dtype)

    def _is_plain(self, name: str) -> bool:
        return isinstance(self._source.encoding(name), DenseEncoding)

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._source.read(name, self._shapes[name])
        self._advance(tensor.nbytes)
        return tensor
