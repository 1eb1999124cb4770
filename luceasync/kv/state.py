"""What layers keep of a lane, as data: rows of its tokens, and what belongs to its end alone.

Owns the words in which a kind of layer says it. Pure: no torch, and no kind of layer is named.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

# Which of a model's dtypes a tensor has: that of keys and values, that of activations, or float32.
Role = Literal["kv", "compute", "float32"]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that a layer keeps. `name` is the kind that a snapshot's names have of it.

    `shape`: of one token's row, or of one lane's end. `leans_on`: what comes next needs it for so
    many of the newest tokens; None: for all of them.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    leans_on: int | None = None


class StateLayout(Hashable, Protocol):
    """A kind of layer, as far as its state goes. Equal ones lie in one tensor, layer by layer."""

    @property
    def rows(self) -> tuple[StateTensor, ...]:
        """What each token leaves behind; it lies in the lane's pages."""
        ...

    @property
    def end(self) -> tuple[StateTensor, ...]:
        """What belongs to the newest token alone, and moves on with it."""
        ...


class ItemSizes(Protocol):
    """Bytes of a number in each role; luceasync.models.precision.Precision has them."""

    def item_bytes(self, role: Role) -> int: ...


def num_bytes(tensors: Iterable[StateTensor], sizes: ItemSizes) -> int:
    """Bytes of one row, or of one lane's end."""
    return sum(prod(tensor.shape) * sizes.item_bytes(tensor.role) for tensor in tensors)
