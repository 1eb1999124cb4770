"""Reads a model's weights to where they run, one tensor at a time, and only what a shard needs.

Knows no kind of layer and no file format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.models.encodings import (
    DenseEncoding,
    Encoding,
    NumbersInMemory,
    Shape,
    WeightPlacement,
)
from luceasync.models.feed_forward.feed_forward import FeedForwardLayer
from luceasync.models.layer_reader import LayerReader, TensorPart, whole
from luceasync.models.mixers.mixer import MixerLayer, State
from luceasync.models.ops import Norm, Ops
from luceasync.models.pass_rows import Handed, Rows
from luceasync.models.precision import Precision
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.random import RandomModule
from luceasync.models.spec import ModelSpec
from luceasync.models.trees import Trees
from luceasync.models.weights import EmbeddingTable, ExpertWeights, Weight


class TensorSource(Protocol):
    """Where tensors come from: a file of some format, or random numbers for a benchmark. Several
    threads may ask at once.
    """

    def encoding(self, name: str) -> Encoding:
        """How the tensor is stored. Raises ModelError if there is none of that name."""
        ...

    def read(self, name: str, shape: Shape) -> Tensor:
        """The plain tensor `name` in its stored dtype, with finite numbers, meant for small ones.
        Checks its shape before it reads a byte. Raises ModelError.
        """
        ...

    def stored(self, name: str, shape: Shape) -> Any:
        """The matrix `name` in the form that its encoding's Stack takes. Checks its shape; may
        read nothing yet. Raises ModelError.
        """
        ...

    def stored_together(self, names: Sequence[str], shape: Shape) -> Iterator[tuple[int, Any]]:
        """Matrices of one shape, as `stored` has one: several as one matrix of all their rows where
        the file has them in one tensor. Each with their number.
        """
        ...


class RandomSource:
    """Random weights of the right shapes, for benchmarks of models that are not at hand.

    Matrices are scaled to keep the size of activations; norms are close to real ones. A tensor's
    numbers depend only on the seed, its name, its shape and the kind of `device`, not on what was
    read before.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        encoding_of: Callable[[str], Encoding] = lambda name: DenseEncoding(),
    ) -> None:
        """`encoding_of`: how to store each tensor, by its name."""
        self._encoding_of = encoding_of
        self._dtype = dtype
        self._device = device
        self._seed = seed

    def encoding(self, name: str) -> Encoding:
        return self._encoding_of(name)

    def stored(self, name: str, shape: Shape) -> NumbersInMemory | RandomModule:
        encoding = self._encoding_of(name)
        if isinstance(encoding, QuantEncoding):
            return RandomModule(name, encoding, shape, self._seeded(name))
        return NumbersInMemory(name, self.read(name, shape))

    def stored_together(
        self, names: Sequence[str], shape: Shape
    ) -> Iterator[tuple[int, NumbersInMemory | RandomModule]]:
        return ((1, self.stored(name, shape)) for name in names)

    def read(self, name: str, shape: Shape) -> Tensor:
        generator = self._seeded(name)
        random = torch.randn(shape, generator=generator, dtype=torch.float32, device=self._device)
        if len(shape) > 1:
            scale: float = shape[-1] ** -0.5
            return (random * scale).to(self._dtype)
        return (random * 0.1).to(self._dtype)

    def _seeded(self, name: str) -> torch.Generator:
        digest = blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        return torch.Generator(self._device).manual_seed(int.from_bytes(digest) >> 1)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer; its state is passed in."""

    mixer: MixerLayer
    feed_forward: FeedForwardLayer

    def forward(self, x: Tensor, state: State, rows: Rows) -> Tensor:
        """x: [entries, rows, hidden], the residual stream. `state` is updated in place."""
        return self.feed_forward.forward(self.mixer.forward(x, state, rows))

    def verify(self, x: Tensor, state: State, rows: Rows, trees: Trees, scratch: State) -> Tensor:
        """`forward` for rows that form trees, see MixerLayer.verify."""
        return self.feed_forward.forward(self.mixer.verify(x, state, rows, trees, scratch))

    def link(self, following: Norm | None) -> None:
        """Tell weights which norms come after their sums; `following` after the layer, if known."""
        # A kind of layer whose sums no product may prepare has no output.
        mixed: Weight | None = getattr(self.mixer, "output", None)
        self.feed_forward.link(mixed, following)

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return self.mixer.num_bytes + self.feed_forward.num_bytes


def read_stacked(
    source: TensorSource,
    parts: Sequence[TensorPart],
    shapes: Mapping[str, Shape],
    place: WeightPlacement,
    advance: Callable[[int], None],
) -> Weight:
    """See TensorReader.stacked. Raises ModelError."""
    segments = []
    for encoding, alike in groupby(parts, lambda part: source.encoding(part.name)):
        segment = list(alike)
        num_rows = [shapes[part.name][0] // part.divisor for part in segment]
        stack = encoding.stack((sum(num_rows), *shapes[parts[0].name][1:]), place)
        begin = 0
        for part, rows in zip(segment, num_rows, strict=True):
            # The tensor has no name here: it is freed before the next one is read.
            num_bytes = stack.fill(begin, source.stored(part.name, shapes[part.name]), part.select)
            advance(num_bytes)
            begin += rows
        segments.append(stack.weight())
    return segments[0] if len(segments) == 1 else place.ops.stacked(segments)


class TensorReader:
    """Reads tensors to their final place. `advance` is passed the stored bytes of each tensor once
    it has been read. What devices find about matrices is known when `place.findings` are read.
    """

    def __init__(
        self,
        source: TensorSource,
        spec: ModelSpec,
        place: WeightPlacement,
        advance: Callable[[int], None] = lambda num_bytes: None,
        handed: Handed | None = None,
    ) -> None:
        """`handed`: that of the shard's other readers, if it has several."""
        self.spec = spec
        self.place = place
        self.handed = handed or Handed()
        self._source = source
        self._advance = advance

    @property
    def ops(self) -> Ops:
        """The operations of the target device."""
        return self.place.ops

    def layer(self, layer: int) -> Layer:
        """Read decoder layer `layer`. Raises ModelError."""
        reader, kinds = self.of_layer(layer), self.spec.layers[layer]
        return Layer(kinds.mixer.load(reader), kinds.feed_forward.load(reader))

    def layers_in_threads(
        self,
        layers: Sequence[int],
        read: Callable[[TensorReader, int], Layer],
        places: Sequence[WeightPlacement],
        on_device: Callable[[], AbstractContextManager[object]],
    ) -> list[Layer]:
        """Read decoder layers by `read`, as many at once as there are `places`, which differ in
        their transfers: while one layer waits for the file or the bus, others are unpacked.
        `on_device`: see Platform. `advance` is called in this thread, for whole layers. Raises
        ModelError, and what `advance` raises.
        """
        idle: SimpleQueue[WeightPlacement] = SimpleQueue()
        for place in places:
            idle.put(place)
        is_inference = torch.is_inference_mode_enabled()  # which is set per thread

        def read_one(layer: int) -> tuple[Layer, int]:
            place, num_bytes = idle.get(), list[int]()
            reader = TensorReader(self._source, self.spec, place, num_bytes.append, self.handed)
            try:
                with on_device(), torch.inference_mode(is_inference):
                    return read(reader, layer), sum(num_bytes)
            finally:
                idle.put(place)

        found: list[Layer] = []
        with ThreadPoolExecutor(len(places), "read-layers") as pool:
            try:
                for reading in [pool.submit(read_one, layer) for layer in layers]:
                    layer, num_bytes = reading.result()
                    found.append(layer)
                    self._advance(num_bytes)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return found

    def of_layer(self, layer: int) -> LayerReader:
        """What decoder layer `layer` is read with."""
        return _TensorsOfLayer(self, layer)

    def stacked(self, parts: Sequence[TensorPart], shapes: dict[str, Shape]) -> Weight:
        """Parts of matrices stacked along their rows; `shapes` has the matrices' shapes by name.
        Neighbours with the same encoding become one matrix, filled part by part.
        """
        return read_stacked(self._source, parts, shapes, self.place, self._advance)

    def experts(self, parts: Sequence[Sequence[str]], shape: Shape) -> ExpertWeights:
        """Matrices of one shape, as many in each part, which must have one encoding."""
        names = [name for part in parts for name in part]
        encoding = self._source.encoding(names[0])
        for name in names:
            if (other := self._source.encoding(name)) != encoding:
                types = [each.type_name(shape, Precision.of("fp32")) for each in (encoding, other)]
                raise ModelError(
                    f"{names[0]!r} is stored as {types[0]}, {name!r} as {types[1]}; experts of one "
                    "layer must have one encoding"
                )
        stack, begin = encoding.stack((len(names) * shape[0], *shape[1:]), self.place), 0
        for part in parts:
            for count, stored in self._source.stored_together(part, shape):
                self._advance(stack.fill(begin, stored, whole))
                begin += count * shape[0]
        return stack.experts(len(parts[0]), len(parts))

    def some_rows(self, name: str, shape: Shape, numbers: Sequence[int]) -> EmbeddingTable:
        """The rows of these numbers of a matrix."""
        stack = self._source.encoding(name).stack((len(numbers), *shape[1:]), self.place)
        stored = self._source.stored(name, shape)
        self._advance(stack.fill(0, stored, lambda rows: rows[list(numbers)]))
        return stack.table()

    def float_matrix(self, name: str, shape: Shape) -> Weight:
        """A small matrix in float32."""
        return self.ops.float_matrix(self.vector(name, shape))

    def table(self, name: str, shape: Shape) -> EmbeddingTable:
        """A matrix with plain rows, which can be looked up."""
        stack = self._source.encoding(name).stack(shape, self.place)
        self._advance(stack.fill(0, self._source.stored(name, shape), whole))
        return stack.table()

    def vector(self, name: str, shape: Shape, offset: float = 0.0) -> Tensor:
        """A small tensor in float32, with `offset` added."""
        tensor = self._source.read(name, shape)
        self._advance(tensor.nbytes)
        small: Tensor = tensor.float().to(self.place.device) + offset
        return small

    def norm(self, name: str, shape: Shape) -> Norm:
        """An RMS norm over the residual stream."""
        spec = self.spec
        return Norm(self.ops, self.vector(name, shape, spec.norm_offset), spec.norm_eps)


class _TensorsOfLayer:
    """LayerReader over a TensorReader."""

    def __init__(self, reader: TensorReader, layer: int) -> None:
        self._reader = reader
        self.layer = layer
        self._prefix = f"{reader.spec.prefix}layers.{layer}."
        shapes = reader.spec.layer_shapes(layer)
        self._shapes = {self._prefix + name: shape for name, shape in shapes.items()}

    @property
    def ops(self) -> Ops:
        return self._reader.ops

    @property
    def handed(self) -> Handed:
        return self._reader.handed

    @property
    def norm_eps(self) -> float:
        return self._reader.spec.norm_eps

    @property
    def norm_offset(self) -> float:
        return self._reader.spec.norm_offset

    def matrix(self, *names: str) -> Weight:
        return self.stacked([TensorPart(name) for name in names])

    def stacked(self, parts: Sequence[TensorPart]) -> Weight:
        full = [TensorPart(self._prefix + p.name, p.select, p.divisor) for p in parts]
        return self._reader.stacked(full, self._shapes)

    def float_matrix(self, name: str) -> Weight:
        name = self._prefix + name
        return self._reader.float_matrix(name, self._shapes[name])

    def experts(self, *parts: Sequence[str]) -> ExpertWeights:
        full = [[self._prefix + name for name in part] for part in parts]
        return self._reader.experts(full, self._shapes[full[0][0]])

    def vector(self, name: str, offset: float = 0.0) -> Tensor:
        name = self._prefix + name
        return self._reader.vector(name, self._shapes[name], offset)

    def norm(self, name: str) -> Norm:
        name = self._prefix + name
        return self._reader.norm(name, self._shapes[name])
