"""The disk as the engine thread sees it: orders return at once, outcomes arrive later.

Owns the values in which nodes travel. Does not know the tree or any file, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from luceasync.disk_cache.codec import Half, NodePart
from luceasync.nodes import MissReason, NodeKey


@dataclass(frozen=True, slots=True)
class HalfNode:
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
class ReadOrder:
    """A node to be read, with or without what belongs to its end. The read is given up after
    `timeout_s`; None: when the disk tier gives up."""

    key: NodeKey
    with_end: bool
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class FindOrder:
    """Half a node whose files no scan has listed; the caller waits `patience_s` for it."""

    key: NodeKey
    half: Half
    patience_s: float


@dataclass(frozen=True, slots=True)
class FetchedNode:
    """A node from the disk, or its span alone, checked to its last byte; the receiver owns the
    tensors. `parts`: those that were read; `file_parts`: all that the files hold, None if the file
    of the end was not opened. `end_fault`: why the end is missing."""

    tensors: Mapping[str, Tensor]
    parts: frozenset[NodePart]
    file_parts: frozenset[NodePart] | None
    num_bytes: int
    end_fault: MissReason | None = None


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The outcome of writing half a node: whether it is there, in a file of `num_bytes`; if not,
    whether to try `again` because the disk was merely busy."""

    half: Half
    is_there: bool
    again: bool = False
    num_bytes: int = 0


class DiskOrders(Protocol):
    """Orders to the tiers beyond memory. Every call returns at once; the prefix cache receives the
    outcomes through `fetched`, `written` and `found`, and the progress of reads through `reading`.
    """

    def file_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """An upper bound of the size of a file of these tensors."""
        ...

    def read(self, orders: Sequence[ReadOrder]) -> None:
        """Read nodes; `fetched` is called for each."""
        ...

    def find(self, orders: Sequence[FindOrder]) -> None:
        """Look for files, here and in the store behind the disk; `found` is called once."""
        ...

    def give_up(self, keys: Sequence[NodeKey]) -> None:
        """Stop reading these nodes; `fetched` is called with the outcome of each."""
        ...

    def write(self, node: HalfNode) -> None:
        """Write half a node, after all earlier orders; `written` is called."""
        ...

    def remove(self, keys: Sequence[NodeKey]) -> None:
        """Remove both files of each node."""
        ...

    def remove_ends(self, keys: Sequence[NodeKey]) -> None:
        """Remove the file of each node's end."""
        ...

    def remove_others(self, num_bytes: int) -> None:
        """Remove `num_bytes` of the files of other models, least recently used first."""
        ...

    def touch(self, keys: Sequence[NodeKey]) -> None:
        """Mark nodes as used now, visibly to other processes."""
        ...

    def quarantine(self, key: NodeKey) -> None:
        """Set aside a node whose contents do not match its name."""
        ...


class NoDisk:
    """A server without a cache directory: no orders are given to it."""

    def file_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        return 0

    def read(self, orders: Sequence[ReadOrder]) -> None:
        raise AssertionError("nothing was ever written: there is nothing to read")

    def find(self, orders: Sequence[FindOrder]) -> None:
        raise AssertionError("no server shares a disk that is not there")

    def give_up(self, keys: Sequence[NodeKey]) -> None:
        return None

    def write(self, node: HalfNode) -> None:
        raise AssertionError("there is no disk: nodes are not queued for it")

    def remove(self, keys: Sequence[NodeKey]) -> None:
        return None

    def remove_ends(self, keys: Sequence[NodeKey]) -> None:
        return None

    def remove_others(self, num_bytes: int) -> None:
        return None

    def touch(self, keys: Sequence[NodeKey]) -> None:
        return None

    def quarantine(self, key: NodeKey) -> None:
        return None
