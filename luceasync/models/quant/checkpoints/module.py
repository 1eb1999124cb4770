"""A module of a quantised checkpoint: what it is made of, and how it becomes our encoding. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from luceasync.errors import ModelError
from luceasync.models.encodings import Select, Shape
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.layout import Real

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.quant.packed import Packed

REALS: dict[str, Real] = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """How safetensors holds a tensor: its dtype as they name it, and its shape."""

    dtype: str
    shape: Shape


TensorInfos = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class QuantMatrix:
    """A quantised matrix of `shape`, in `encoding`. `names`: of the stored tensors, by what `pack` is
    given them as; it moves their bits.
    """

    encoding: QuantEncoding
    shape: Shape
    names: dict[str, str]
    pack: Callable[[QuantEncoding, Mapping[str, Tensor]], Packed]


class Scheme(Protocol):
    """One way in which checkpoints store matrices."""

    @property
    def words(self) -> str:
        """What it is called."""
        ...

    def find(self, module: str, infos: TensorInfos) -> QuantMatrix | None:
        """The matrix of `module` ("model.layers.0.mlp.up_proj"); None: it is stored plainly, or
        not at all. Raises ModelError for one that is neither.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """What was read of a module; see luceasync.models.quant.stack.StoredQuantised."""

    name: str
    found: QuantMatrix
    tensors: Mapping[str, Tensor]

    def packed(self, select: Select) -> Iterator[Packed]:
        """See Quantised."""
        from luceasync.models.quant.packed import Packed

        try:
            whole = self.found.pack(self.found.encoding, self.tensors)
        except ModelError as error:
            raise ModelError(f"{self.name!r}: {error}") from None
        yield Packed(whole.layout, **{name: select(t) for name, t in whole.tensors.items()})


def require_tensor(infos: TensorInfos, name: str, dtypes: tuple[str, ...]) -> TensorInfo:
    """A tensor that must be there, in one of `dtypes`. Raises ModelError."""
    info = infos.get(name)
    if info is None:
        raise ModelError(f"the weights have no tensor {name!r}")
    if info.dtype not in dtypes:
        raise ModelError(f"{name!r} is stored as {info.dtype}; expected {' or '.join(dtypes)}")
    return info


def require_matrix(infos: TensorInfos, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """The shape of such a tensor, which must have two dimensions. Raises ModelError."""
    shape = require_tensor(infos, name, dtypes).shape
    if len(shape) != 2:
        raise ModelError(f"{name!r} has shape {shape}; expected two dimensions")
    return shape[0], shape[1]


def check_shape(name: str, info: TensorInfo, expected: Shape) -> None:
    """Raises ModelError where they differ."""
    if info.shape != expected:
        raise ModelError(f"{name!r} has shape {info.shape}; expected {expected}")
