"""What a layer multiplies rows with, whatever numbers it is held in.

Owns the protocol, and weights of parts that are stored unlike. Pure at its top; names no format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class InputNorm(Protocol):
    """An RMS norm of rows [..., dim] that are multiplied next; `weight`: float32 [dim]."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Weight(Protocol):
    """A matrix [out, dim] on a device, in the form that the operations there want."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that it stands for: what `linear` is computed in."""
        ...

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        """x @ weight^T, of x as `norm` has it if one is given. x: [..., dim] -> [..., out]."""
        ...

    def linear_float(
        self, x: Tensor, norm: InputNorm | None = None, out: Tensor | None = None
    ) -> Tensor:
        """`linear` in float32, in `out` if it is given: not rounded before where that costs
        nothing.
        """
        ...

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x @ weight^T; `residual` may be what is returned, overwritten."""
        ...

    def swiglu(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        """silu(gate) * up, where gate is the first half of `linear` and up the second. ->
        [..., out / 2].
        """
        ...


class EmbeddingTable(Weight, Protocol):
    """A Weight whose rows are also looked up one by one: an embedding, perhaps the head too."""

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of int64 ids [...]: [..., dim]."""
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
        """x and what the network makes of it as `norm` has it: [..., dim]; x may be overwritten."""
        return self.down.linear_add(self.gate_up.swiglu(x, norm), x)


def as_float(product: Tensor, out: Tensor | None) -> Tensor:
    """`product` in float32, in `out` if it is given."""
    return product.float() if out is None else out.copy_(product)


class StackedWeight:
    """Segments that are stored unlike, one below the other: a Weight."""

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
