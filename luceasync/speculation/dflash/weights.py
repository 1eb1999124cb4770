"""A drafter's weights: their names in checkpoints, and their layout in the network.

Reads safetensors only. A tensor that the network would not use is refused: it belongs to a variant
of DFlash, which without it would silently propose badly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.models.encodings import DenseEncoding, Encoding, NumbersInMemory
from luceasync.models.feed_forward.dense import DenseLayer
from luceasync.models.formats.safetensors import Checkpoint, open_checkpoint
from luceasync.models.loader import TensorSource
from luceasync.models.ops import Norm, Ops
from luceasync.models.spec import Shape
from luceasync.models.weights import Weight
from luceasync.speculation.dflash.draft_config import MASK_EMBEDDING, DraftSpec

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

    @property
    def num_bytes(self) -> int:
        parts = (self.norm, self.projection, self.output, self.feed_forward)
        return self.head_norms.nbytes + sum(part.num_bytes for part in parts)


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """All weights on one device, matrices in one dtype, norms float32.

    fc [hidden, taps * hidden]; context_kv [layers * 2 * kv_dim, hidden], the key and value rows of
    layer 0, then those of layer 1, ...: context becomes the rows of all layers in one product;
    key_norms [layers, head_dim]. `mask_embedding` [hidden] or None: the target's row of the mask
    token. All but fc and mask_embedding are packed for the operations that use them.
    """

    fc: Tensor
    hidden_norm: Norm
    context_kv: Weight
    key_norms: Tensor
    norm: Tensor
    mask_embedding: Tensor | None
    layers: list[DraftLayerWeights]

    @property
    def num_bytes(self) -> int:
        tensors = self.fc.nbytes + self.key_norms.nbytes + self.norm.nbytes
        ends = self.hidden_norm.num_bytes + self.context_kv.num_bytes
        return tensors + ends + sum(layer.num_bytes for layer in self.layers)


@contextmanager
def open_draft(draft_dir: Path) -> Iterator[DraftSource]:
    """The weight files of `draft_dir`, by published names. Raises ModelError."""
    with open_checkpoint(draft_dir) as checkpoint:
        stored = {_published_name(name): name for name in checkpoint.names}
        yield DraftSource(draft_dir, checkpoint, stored)


class DraftSource:
    """See TensorSource; translates the names by which drafters are published."""

    def __init__(self, draft_dir: Path, checkpoint: Checkpoint, stored: Mapping[str, str]) -> None:
        self._draft_dir = draft_dir
        self._checkpoint = checkpoint
        self._stored = stored  # published name -> name in the file

    def encoding(self, name: str) -> Encoding:
        return DenseEncoding()

    def read(self, name: str, shape: Shape) -> Tensor:
        return self._checkpoint.read(self._stored.get(name, name), shape)

    def stored(self, name: str, shape: Shape) -> NumbersInMemory:
        return NumbersInMemory(name, self.read(name, shape))

    def stored_together(
        self, names: Sequence[str], shape: Shape
    ) -> Iterator[tuple[int, NumbersInMemory]]:
        return ((1, self.stored(name, shape)) for name in names)

    def check(self, spec: DraftSpec) -> None:
        """Raise ModelError for a tensor that the network of `spec` would not use."""
        unknown = sorted(set(self._stored) - spec.shapes.keys() - set(TARGETS_OWN))
        if unknown:
            raise ModelError(
                f"{self._draft_dir}: {unknown[0]!r} and {len(unknown) - 1} other tensors are not "
                "part of the DFlash drafter that config.json describes"
            )

    @property
    def has_mask_embedding(self) -> bool:
        return MASK_EMBEDDING in self._stored


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
    return DraftWeights(
        fc=reader.matrix("fc.weight"),
        hidden_norm=Norm(ops, reader.vector("hidden_norm.weight"), spec.norm_eps),
        context_kv=ops.pack(reader.matrix(*projections)),
        key_norms=torch.stack([reader.vector(name) for name in key_norms]),
        norm=reader.vector("norm.weight"),
        mask_embedding=reader.vector(MASK_EMBEDDING).to(dtype) if has_mask_embedding else None,
        layers=[_read_layer(spec, reader, ops, layer) for layer in range(spec.num_layers)],
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
    )


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
    return ALIASES.get(name, name)
