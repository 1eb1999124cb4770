"""Weights of a Hugging Face model directory, one tensor at a time: only what a range of layers
needs.

Checks every shape against the spec before a byte is read. Knows no families and no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.models.files import weight_files
from luceasync.models.spec import ModelSpec, Shape

STORED_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or random numbers for a benchmark."""

    def read(self, name: str, shape: Shape) -> Tensor:
        """The tensor `name` on the CPU, in the dtype it is stored in. Raises ModelError."""
        ...


class Checkpoint:
    """The safetensors files of one directory. Use `open_checkpoint`."""

    def __init__(self, model_dir: Path, files: Mapping[str, object]) -> None:
        self._model_dir = model_dir
        self._files = files  # tensor name -> open safetensors file

    def read(self, name: str, shape: Shape) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self._model_dir}: the weights have no tensor {name!r}")
        try:
            found = tuple(file.get_slice(name).get_shape())  # type: ignore[attr-defined]
            if found != shape:
                raise ModelError(f"{self._model_dir}: {name!r} has shape {found}, expected {shape}")
            dtype = file.get_slice(name).get_dtype()  # type: ignore[attr-defined]
            if dtype not in STORED_DTYPES:  # quantized values, whose scales we would not apply
                raise ModelError(
                    f"{self._model_dir}: {name!r} is stored as {dtype}; "
                    f"{', '.join(STORED_DTYPES)} are supported"
                )
            return file.get_tensor(name)  # type: ignore[attr-defined]
        except SafetensorError as error:
            raise ModelError(f"{self._model_dir}: {name!r} cannot be read: {error}") from None


@contextmanager
def open_checkpoint(model_dir: Path) -> Iterator[Checkpoint]:
    """Open every weight file of `model_dir` (mapped, not read). Raises ModelError."""
    with ExitStack() as stack:
        files: dict[str, object] = {}
        for path in weight_files(model_dir):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
            files.update(dict.fromkeys(file.keys(), file))
        yield Checkpoint(model_dir, files)


class RandomSource:
    """Random weights of the right shapes, for benchmarks of models that are not at hand.

    Matrices are scaled so that activations keep their size; norms are near what real ones are.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._dtype = dtype
        self._device = device

    def read(self, name: str, shape: Shape) -> Tensor:
        random = torch.randn(
            shape, generator=self._generator, dtype=torch.float32, device=self._device
        )
        if len(shape) > 1:
            return (random * shape[-1] ** -0.5).to(self._dtype)
        return (random * 0.1).to(self._dtype)


def whole(tensor: Tensor) -> Tensor:
    """Every row of a stored matrix."""
    return tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of the stored matrix `name`: what `select` gives, one in `divisor` of all."""

    name: str
    select: Callable[[Tensor], Tensor]
    divisor: int = 1

    def num_rows(self, shape: Shape) -> int:
        return shape[0] // self.divisor


class TensorReader:
    """Reads tensors to their final place: the device and dtype of one shard.

    `advance` is told the bytes of every stored tensor once it has been read; `pack` brings a weight
    into the form that the shard's operations want.
    """

    def __init__(
        self,
        source: TensorSource,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        advance: Callable[[int], None],
        pack: Callable[[Tensor], Tensor],
    ) -> None:
        self.spec = spec
        self._pack = pack
        self._source = source
        self._device = device
        self._dtype = dtype
        self._advance = advance

    def matrix(self, names: Sequence[str], shapes: Mapping[str, Shape]) -> Tensor:
        """The matrices `names` stacked along their rows."""
        return self.stacked([Part(name, whole) for name in names], shapes)

    def stacked(self, parts: Sequence[Part], shapes: Mapping[str, Shape]) -> Tensor:
        """Parts of matrices stacked along their rows, packed: filled part by part, so that beside
        it no more than one stored tensor is ever held.
        """
        num_rows = sum(part.num_rows(shapes[part.name]) for part in parts)
        shape = (num_rows, *shapes[parts[0].name][1:])
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        begin = 0
        for part in parts:
            end = begin + part.num_rows(shapes[part.name])
            self._fill(out[begin:end], part, shapes[part.name])
            begin = end
        return self._pack(out)

    def table(self, name: str, shape: Shape) -> Tensor:
        """A matrix whose rows are looked up one by one: as it is."""
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._fill(out, Part(name, whole), shape)
        return out

    def _fill(self, out: Tensor, part: Part, shape: Shape) -> None:
        """Read one part; what was read is gone when this returns."""
        rows = part.select(self._source.read(part.name, shape))
        out.copy_(rows)
        self._advance(rows.numel() * rows.element_size())

    def vector(self, name: str, shapes: Mapping[str, Shape], offset: float = 0.0) -> Tensor:
        """A small tensor in float32, `offset` added."""
        return self._read(name, shapes[name]).float().to(self._device) + offset

    def _read(self, name: str, shape: Shape) -> Tensor:
        tensor = self._source.read(name, shape)
        self._advance(prod(shape) * tensor.element_size())
        return tensor


def layer_names(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Full checkpoint names of one layer's tensors and their shapes."""
    prefix = f"{spec.prefix}layers.{layer}."
    return {prefix + name: shape for name, shape in spec.layer_shapes(layer).items()}
