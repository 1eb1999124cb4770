"""Weights: what layers multiply rows with, in any encoding.

Owns the protocols, those of routed experts included, and weights whose parts differ in encoding.
Pure at its top; names no format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class InputNorm(Protocol):
    """An RMS norm over rows [..., dim] that a weight multiplies next. `weight`: float32 [dim]."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    @property
    def ahead(self) -> RowsAhead: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class RowsAhead:
    """What the product before a norm has prepared of its rows for the product behind it."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Any] | None = None

    def put(self, rows: Tensor, prepared: Any) -> None:
        """Keep what was prepared of `rows`, and `rows` themselves, until they are taken."""
        self._kept = rows, prepared

    def take(self, rows: Tensor) -> Any:
        """What was prepared of these rows; None if nothing was."""
        if self._kept is None:
            return None
        (own, prepared), self._kept = self._kept, None
        is_same = own.data_ptr() == rows.data_ptr() and own.shape == rows.shape
        return prepared if is_same else None


class Weight(Protocol):
    """A matrix [out, dim] on a device, in the layout that its operations want."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `linear` computes in."""
        ...

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        """x @ weight^T: [..., dim] -> [..., out]. Applies `norm` to x first, if given."""
        ...

    def linear_float(
        self, x: Tensor, norm: InputNorm | None = None, out: Tensor | None = None
    ) -> Tensor:
        """`linear` in float32, in `out` if given; not rounded before where that is free."""
        ...

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x @ weight^T. May overwrite and return `residual`."""
        ...

    def swiglu(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        """silu(gate) * up, the halves of `linear` in this order: -> [..., out / 2]."""
        ...


class EmbeddingTable(Weight, Protocol):
    """A Weight whose rows can also be looked up: an embedding, perhaps tied to the head."""

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of int64 ids: [...] -> [..., dim]."""
        ...


class SwiGLU:
    """The matrices of a gated feed-forward network. gate_up: [2 * inner, dim], gate first; down:
    [dim, inner].
    """

    def __init__(self, gate_up: Weight, down: Weight) -> None:
        self.gate_up = gate_up
        self.down = down

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes

    def add_to(self, x: Tensor, norm: InputNorm) -> Tensor:
        """x + down(swiglu(gate_up(norm(x)))): [..., dim]. May overwrite x."""
        return self.down.linear_add(self.gate_up.swiglu(x, norm), x)


def as_float(product: Tensor, out: Tensor | None) -> Tensor:
    """`product` in float32, in `out` if given."""
    return product.float() if out is None else out.copy_(product)


class StackedWeight:
    """A Weight of segments with different encodings, stacked along their rows."""

    def __init__(self, segments: Sequence[Weight]) -> None:
        self.segments = tuple(segments)

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def dtype(self) -> torch.dtype:
        return self.segments[0].dtype

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        import torch

        x = x if norm is None else norm(x)
        return torch.cat([segment.linear(x) for segment in self.segments], -1)

    def linear_float(
        self, x: Tensor, norm: InputNorm | None = None, out: Tensor | None = None
    ) -> Tensor:
        return as_float(self.linear(x, norm), out)

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.linear(x)

    def swiglu(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        from torch.nn.functional import silu

        gate, up = self.linear(x, norm).chunk(2, -1)
        return silu(gate) * up


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become `num_chosen` experts of a row and their weights, in float32.

    `is_normalised`: weights are divided by their sum; then they are multiplied by `scale`. Of equal
    scores that of the lower number comes first.
    """

    num_chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    softcap: float = 0.0  # of logits; 0: none


@dataclass(frozen=True, slots=True)
class Router:
    """What scores experts: a norm, float32 rows of all experts, a bias for the choice, and a row
    whose product weighs a shared expert.
    """

    routing: Routing
    norm: InputNorm
    weight: Weight
    bias: Tensor | None = None  # float32 [experts]
    shared_gate: Weight | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts of each of n rows, k of them, and the n * k choices sorted by expert.

    `weights`: float32 [n, k], that of the best expert first. `rows`: [n * k], the row of each place
    in the sorted order; `places`: [n, k], the place of each choice; `bounds`: [experts + 1], where
    the places of each expert begin. All are integers on the rows' device.
    """

    weights: Tensor
    rows: Tensor
    places: Tensor
    bounds: Tensor


class ExpertWeights(Protocol):
    """One matrix [out, dim] for each expert, or the gate and the up of each, on a device."""

    @property
    def num_bytes(self) -> int: ...

    def linear(self, x: Tensor, choice: Choice) -> Tensor:
        """x @ weight^T of each place's expert: [places, dim] -> [places, out]."""
        ...

    def swiglu(self, x: Tensor, choice: Choice) -> Tensor:
        """silu(gate) * up of each place's expert: [rows, dim] -> [places, out / 2]."""
        ...
