"""The disk tier as the engine thread sees it: orders go out at once, outcomes come back later.

Owns the form in which a node travels. Knows no tree, no file and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from luceasync.disk_cache.codec import Half, Part
from luceasync.nodes import MissReason, NodeKey


@dataclass(frozen=True, slots=True)
class KeptNode:
    """Half a node on its way to a file. `tensors` are in host memory and do not change any more."""

    half: Half
    key: NodeKey
    parent: NodeKey | None
    begin: int
    end: int
    is_turn_end: bool
    is_generated: bool
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Order:
    """A node to be read, with what belongs to its end or without; it is given up after `timeout_s`,
    None: when the disk itself gives up.
    """

    key: NodeKey
    with_end: bool
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A node from the disk, or its span alone, checked to its last byte; the tensors are the
    receiver's. `parts`: what came, `file_parts`: all that the files hold, None where that of the
    end was not looked at. `end_fault`: why its end did not come with it.
    """

    tensors: Mapping[str, Tensor]
    parts: frozenset[Part]
    file_parts: frozenset[Part] | None
    num_bytes: int
    end_fault: MissReason | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a write of half a node: whether it is there, in a file of `num_bytes`; if it
    is not, whether to try again, since the disk was only too busy.
    """

    half: Half
    is_there: bool
    again: bool = False
    num_bytes: int = 0


class DiskOrders(Protocol):
    """Where nodes are kept beyond memory. Every call returns at once; Outcomes hears the rest."""

    def file_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """How large their file is at most."""
        ...

    def read(self, orders: Sequence[Order]) -> None: ...

    def write(self, node: KeptNode) -> None: ...

    def remove(self, keys: Sequence[NodeKey]) -> None: ...

    def remove_ends(self, keys: Sequence[NodeKey]) -> None: ...

    def touch(self, keys: Sequence[NodeKey]) -> None: ...

    def quarantine(self, key: NodeKey) -> None: ...


class NoDisk:
    """Of a server without a cache directory: nothing is ever asked of it."""

    def file_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        return 0

    def read(self, orders: Sequence[Order]) -> None:
        raise AssertionError("nothing was ever written, so nothing can be read")

    def write(self, node: KeptNode) -> None:
        raise AssertionError("nodes are not queued for a disk that there is not")

    def remove(self, keys: Sequence[NodeKey]) -> None:
        return None

    def remove_ends(self, keys: Sequence[NodeKey]) -> None:
        return None

    def touch(self, keys: Sequence[NodeKey]) -> None:
        return None

    def quarantine(self, key: NodeKey) -> None:
        return None
