"""A quantised module of a checkpoint: its tensors, and the Scheme that finds and converts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from luceasync.errors import ModelError
from luceasync.models.encodings import Select, Shape, WeightPlacement
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.layout import Real

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.quant.packed import Packed

REALS: dict[str, Real] = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a safetensors header: its dtype, as the format names it, and its shape."""

    dtype: str
    shape: Shape


TensorInfos = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class QuantMatrix:
    """A quantised matrix of `shape` in `encoding`. `names` maps the argument names of `pack`, which
    moves the bits, to those of the stored tensors.
    """

    encoding: QuantEncoding
    shape: Shape
    names: dict[str, str]
    pack: Callable[[QuantEncoding, Mapping[str, Tensor]], Packed]


class Scheme(Protocol):
    """A way in which checkpoints store quantised matrices."""

    @property
    def name(self) -> str:
        """Its display name."""
        ...

    def find(self, module: str, infos: TensorInfos) -> QuantMatrix | None:
        """Find the matrix of `module` ("model.layers.0.mlp.up_proj"); None if it is stored plainly
        or not at all. Raises ModelError for an invalid one.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of a module as they were read: a StoredQuantised."""

    label: str
    found: QuantMatrix
    tensors: Mapping[str, Tensor]

    def packed(self, select: Select, place: WeightPlacement) -> Iterator[Packed]:
        from luceasync.models.quant.packed import Packed

        there = {name: tensor.to(place.device) for name, tensor in self.tensors.items()}
        try:
            whole = self.found.pack(self.found.encoding, there)
        except ModelError as error:
            raise ModelError(f"{self.label}: {error}") from None
        yield Packed(whole.layout, **{name: select(t) for name, t in whole.tensors.items()})


def require_tensor(infos: TensorInfos, name: str, dtypes: tuple[str, ...]) -> TensorInfo:
    """A tensor that must exist, in one of `dtypes`. Raises ModelError."""
    info = infos.get(name)
    if info is None:
        raise ModelError(f"the weights have no tensor {name!r}")
    if info.dtype not in dtypes:
        raise ModelError(f"{name!r} is stored as {info.dtype}; expected {' or '.join(dtypes)}")
    return info


def require_matrix(infos: TensorInfos, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """The shape of a required tensor that must be a matrix. Raises ModelError."""
    shape = require_tensor(infos, name, dtypes).shape
    if len(shape) != 2:
        raise ModelError(f"{name!r} has shape {shape}; expected two dimensions")
    return shape[0], shape[1]


def check_shape(name: str, info: TensorInfo, expected: Shape) -> None:
    """Raise ModelError unless the shapes agree."""
    if info.shape != expected:
        raise ModelError(f"{name!r} has shape {info.shape}; expected {expected}")
