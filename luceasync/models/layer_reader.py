"""How kinds of layers read their weights. Pure at its top; does not know sources or files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from luceasync.models.encodings import Select

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.ops import Norm, Ops
    from luceasync.models.pass_rows import Handed
    from luceasync.models.weights import ExpertWeights, Weight


def whole(tensor: Tensor) -> Tensor:
    """Every row of a stored matrix."""
    return tensor


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows of the stored matrix `name`: those that `select` picks, one `divisor`-th of all."""

    name: str
    select: Select = whole
    divisor: int = 1


class LayerReader(Protocol):
    """The tensors of one layer, by their names below `layers.<layer>.`. All raise ModelError."""

    @property
    def ops(self) -> Ops:
        """The operations of the device that the layer runs on."""
        ...

    @property
    def layer(self) -> int:
        """The layer's number in the model."""
        ...

    @property
    def handed(self) -> Handed:
        """What the layers of the shard hand to later ones within a pass."""
        ...

    @property
    def norm_eps(self) -> float:
        """The epsilon of the model's RMS norms."""
        ...

    @property
    def norm_offset(self) -> float:
        """What is added to the stored weights of norms."""
        ...

    def matrix(self, *names: str) -> Weight:
        """The named matrices, stacked along their rows."""
        ...

    def stacked(self, parts: Sequence[TensorPart]) -> Weight:
        """Parts of matrices, stacked along their rows."""
        ...

    def float_matrix(self, name: str) -> Weight:
        """A matrix in float32, whose shape is a FloatMatrix."""
        ...

    def experts(self, *parts: Sequence[str]) -> ExpertWeights:
        """The matrices of experts: `names` of all of them, or of all gates and of all ups. They
        have one encoding."""
        ...

    def vector(self, name: str, offset: float = 0.0) -> Tensor:
        """A small tensor in float32, with `offset` added."""
        ...

    def norm(self, name: str) -> Norm:
        """An RMS norm over the residual stream."""
        ...
