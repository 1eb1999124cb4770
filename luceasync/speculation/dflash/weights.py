"""A drafter's weights: their names in checkpoints, and their layout in the network.

Reads safetensors only. A tensor that the network would not use is refused: it belongs to a variant
of DFlash, which without it would silently propose badly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.models.encodings import DenseEncoding, Encoding, NumbersInMemory
from luceasync.models.feed_forward.dense import DenseLayer
from luceasync.models.formats.safetensors import Checkpoint, open_checkpoint
from luceasync.models.loader import TensorSource
from luceasync.models.ops import Norm, Ops
from luceasync.models.spec import Shape
from luceasync.models.weights import Weight
from luceasync.speculation.dflash.dflash2 import (
    BlockConvolution,
    CandidateSelector,
    LayerConvolutions,
)
from luceasync.speculation.dflash.draft_spec import (
    FUSED,
    GATE,
    MASK_EMBEDDING,
    SELECTOR,
    DraftSpec,
    aux_norm,
    convolution_names,
)

ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# Some checkpoints repeat weights of the target.
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight")


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
    """All weights on one device, matrices in one dtype, norms float32.

    fc [hidden, taps * hidden]; context_kv [layers * 2 * kv_dim, hidden], the key and value rows of
    layer 0, then those of layer 1, ...: context becomes the rows of all layers in one product;
    key_norms [layers, head_dim]. `mask_embedding` [hidden] or None: the target's row of the mask
    token. All but fc and mask_embedding are packed for the operations that use them. `tap_norms`
    [taps, hidden], those of features. `context_norm`: without a weight, the norm of all layers,
    whose weights are in the columns of context_kv.
    """

    fc: Tensor
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
        tensors = self.fc.nbytes + self.key_norms.nbytes + self.norm.nbytes
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


@contextmanager
def open_draft(draft_dir: Path, spec: DraftSpec) -> Iterator[DraftSource]:
    """The weight files of `draft_dir`, by published names. Raises ModelError, also for a tensor
    that the network of `spec` would not use.
    """
    with open_checkpoint(draft_dir) as checkpoint:
        stored = {_published_name(name): name for name in checkpoint.names}
        source = DraftSource(draft_dir, checkpoint, stored, spec)
        source.check()
        yield source


class DraftSource:
    """See TensorSource; translates the names by which drafters are published."""

    def __init__(
        self, draft_dir: Path, checkpoint: Checkpoint, stored: Mapping[str, str], spec: DraftSpec
    ) -> None:
        self._draft_dir = draft_dir
        self._checkpoint = checkpoint
        self._stored = stored  # published name -> name in the file
        self._shapes = spec.shapes
        self._of_selector = set(spec.selector_shapes)
        self._parts = dict(self._parts_of(spec))

    def encoding(self, name: str) -> Encoding:
        return DenseEncoding()

    def read(self, name: str, shape: Shape) -> Tensor:
        if (part := self._parts.get(name)) is None:
            return self._checkpoint.read(self._stored.get(name, name), shape)
        whole = self._checkpoint.read(self._stored[part.name], (part.num_rows, *shape[1:]))
        return whole[part.begin : part.begin + shape[0]]

    def _parts_of(self, spec: DraftSpec) -> Iterator[tuple[str, _Part]]:
        """Where matrices are that are stored with others in one tensor."""
        for layer in range(spec.num_layers):
            prefix = f"layers.{layer}."
            for fused, names in FUSED.items():
                if prefix + fused not in self._stored:
                    continue
                heights = [self._shapes[prefix + name][0] for name in names]
                begins = accumulate(heights[:-1], initial=0)
                for name, begin in zip(names, begins, strict=True):
                    yield prefix + name, _Part(prefix + fused, begin, sum(heights))

    def stored(self, name: str, shape: Shape) -> NumbersInMemory:
        return NumbersInMemory(name, self.read(name, shape))

    def stored_together(
        self, names: Sequence[str], shape: Shape
    ) -> Iterator[tuple[int, NumbersInMemory]]:
        return ((1, self.stored(name, shape)) for name in names)

    def check(self) -> None:
        """Raise ModelError for a tensor that the network would not use."""
        fused = {part.name for part in self._parts.values()}
        known = self._shapes.keys() | self._of_selector | fused
        unknown = sorted(set(self._stored) - known - set(TARGETS_OWN))
        if unknown:
            raise ModelError(
                f"{self._draft_dir}: {unknown[0]!r} and {len(unknown) - 1} other tensors are not "
                "part of the DFlash drafter that config.json describes"
            )

    @property
    def has_mask_embedding(self) -> bool:
        return MASK_EMBEDDING in self._stored


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows from `begin` on of the tensor `name`, which has `num_rows`."""

    name: str
    begin: int
    num_rows: int


def read_weights(
    spec: DraftSpec,
    source: TensorSource,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_mask_embedding: bool = False,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> DraftWeights:
    """Read all tensors to `device`; `advance` hears the bytes of each. Raises ModelError."""
    reader = _Reader(spec, source, dtype, device, advance)
    projections = [
        f"layers.{layer}.self_attn.{name}_proj.weight"
        for layer in range(spec.num_layers)
        for name in "kv"
    ]
    key_norms = [f"layers.{layer}.self_attn.k_norm.weight" for layer in range(spec.num_layers)]
    context_kv, tap_norms, context_norm = reader.matrix(*projections), None, None
    if spec.norms_context:
        norms = [f"layers.{layer}.input_layernorm.weight" for layer in range(spec.num_layers)]
        by_layer = torch.stack([reader.vector(name) for name in norms])[:, None]
        scaled = context_kv.view(spec.num_layers, -1, spec.hidden_size).float() * by_layer
        context_kv = scaled.flatten(0, 1).to(dtype)
        tap_norms = torch.stack([reader.vector(aux_norm(tap)) for tap in range(len(spec.taps))])
        context_norm = Norm(ops, torch.ones(spec.hidden_size, device=device), spec.norm_eps)
    return DraftWeights(
        fc=reader.matrix("fc.weight"),
        hidden_norm=Norm(ops, reader.vector("hidden_norm.weight"), spec.norm_eps),
        context_kv=ops.pack(context_kv),
        key_norms=torch.stack([reader.vector(name) for name in key_norms]),
        norm=reader.vector("norm.weight"),
        mask_embedding=reader.vector(MASK_EMBEDDING).to(dtype) if has_mask_embedding else None,
        layers=[_read_layer(spec, reader, ops, layer) for layer in range(spec.num_layers)],
        tap_norms=tap_norms,
        context_norm=context_norm,
    )


def _read_layer(spec: DraftSpec, reader: _Reader, ops: Ops, layer: int) -> DraftLayerWeights:
    prefix, eps = f"layers.{layer}.", spec.norm_eps
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    projections = [f"{attention}{name}_proj.weight" for name in "qkv"]
    return DraftLayerWeights(
        norm=Norm(ops, reader.vector(prefix + "input_layernorm.weight"), eps),
        projection=ops.pack(reader.matrix(*projections)),
        head_norms=torch.cat(
            [
                reader.vector(attention + "q_norm.weight").expand(spec.attention.num_heads, -1),
                reader.vector(attention + "k_norm.weight").expand(spec.attention.num_kv_heads, -1),
            ]
        ),
        output=ops.pack(reader.matrix(attention + "o_proj.weight")),
        feed_forward=DenseLayer(
            norm=Norm(ops, reader.vector(prefix + "post_attention_layernorm.weight"), eps),
            network=ops.gated(
                ops.pack(reader.matrix(mlp + "gate_proj.weight", mlp + "up_proj.weight")),
                ops.pack(reader.matrix(mlp + "down_proj.weight")),
            ),
        ),
        gate=ops.pack(reader.matrix(prefix + GATE)) if spec.gate else None,
        convolutions=_read_convolutions(spec, reader, ops, layer) if spec.convolution else None,
    )


def _read_convolutions(spec: DraftSpec, reader: _Reader, ops: Ops, layer: int) -> LayerConvolutions:
    def read(half: Literal["attention", "mlp"]) -> BlockConvolution:
        base, dynamic = convolution_names(layer, half)
        return BlockConvolution(reader.matrix(base), ops.pack(reader.matrix(dynamic)))

    return LayerConvolutions(read("attention"), read("mlp"))


def read_selector(
    draft_dir: Path, spec: DraftSpec, dtype: torch.dtype, device: torch.device
) -> CandidateSelector | None:
    """What chooses the tokens of the drafter in `draft_dir`, on any device; None: it has nothing of
    the kind. Raises ModelError.
    """
    if spec.selector is None:
        return None
    with open_draft(draft_dir, spec) as source:
        projection, predecessors, successors = (
            source.read(name, shape).to(device, dtype)
            for name, shape in spec.selector_shapes.items()
        )
    return CandidateSelector(spec.selector, predecessors, successors, projection)


class _Reader:
    """Reads tensors of the spec's shapes to their device."""

    def __init__(
        self,
        spec: DraftSpec,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        advance: Callable[[int], None],
    ) -> None:
        self._shapes = spec.shapes
        self._source = source
        self._dtype = dtype
        self._device = device
        self._advance = advance

    def matrix(self, *names: str) -> Tensor:
        """The matrices `names` stacked along their rows."""
        return torch.cat([self._read(name).to(self._device, self._dtype) for name in names])

    def vector(self, name: str) -> Tensor:
        """A small tensor in float32."""
        return self._read(name).to(self._device, torch.float32)

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._source.read(name, self._shapes[name])
        self._advance(tensor.nbytes)
        return tensor


def _published_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith(SELECTOR) and "codebook" in name:
        name = name.removesuffix(".weight")  # those of an embedding, which some writers make of it
    return ALIASES.get(name, name)
