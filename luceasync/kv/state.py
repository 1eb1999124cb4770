"""The state that layers keep per lane, as data: a row for each token, and what belongs to the
newest token alone (the lane's end).

A kind of layer declares its state with these types. Pure: no torch; names no kind of layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

# The dtype of a tensor: that of keys and values, that of activations, or float32.
Role = Literal["kv", "compute", "float32"]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that a layer keeps. `name` is the kind in the tensor's snapshot name.

    `shape` is that of one token's row, or of one lane's end. `has_spare`, of an end: there is one
    more lane for what padding entries write, and for the end at a mark. Ends that are too large for
    this are written by real lanes only, and saved where a chunk ends. `can_rerun`, of an end: after
    the next token was run, another one may be run in its place.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    has_spare: bool = True
    can_rerun: bool = False


class StateLayout(Hashable, Protocol):
    """The state of a kind of layer. Layers with equal layouts share stacked tensors."""

    @property
    def rows(self) -> tuple[StateTensor, ...]:
        """What each token leaves in the lane's pages."""
        ...

    @property
    def end(self) -> tuple[StateTensor, ...]:
        """What belongs to the newest token alone and is overwritten as the lane advances."""
        ...


class ItemSizes(Protocol):
    """Bytes of a number in each role, as luceasync.models.precision.Precision has them."""

    def item_bytes(self, role: Role) -> int: ...


def num_bytes(tensors: Iterable[StateTensor], sizes: ItemSizes) -> int:
    """Bytes of one row, or of one lane's end."""
    return sum(prod(tensor.shape) * sizes.item_bytes(tensor.role) for tensor in tensors)
