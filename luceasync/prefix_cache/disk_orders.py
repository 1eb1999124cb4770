"""The disk as the engine thread sees it: orders return at once, outcomes come back later.

Owns the values in which nodes travel. Knows no tree and no file, and decides nothing.
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
    """Half a node on its way to a file. `tensors` are in host memory and no longer change."""

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
    """A node to be read, with what belongs to its end or without; it is given up after `timeout_s`,
    None: when the disk tier gives up.
    """

    key: NodeKey
    with_end: bool
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class FindOrder:
    """Half a node whose files no scan has listed; it is worth waiting `patience_s` for."""

    key: NodeKey
    half: Half
    patience_s: float


@dataclass(frozen=True, slots=True)
class FetchedNode:
    """A node from the disk, or its span alone, checked to its last byte; the receiver owns the
    tensors. `parts`: those that were read; `file_parts`: all that the files hold, None if the file
    of the end was not opened. `end_fault`: why the end did not come with it.
    """

    tensors: Mapping[str, Tensor]
    parts: frozenset[NodePart]
    file_parts: frozenset[NodePart] | None
    num_bytes: int
    end_fault: MissReason | None = None


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The outcome of writing half a node: whether it is there, in a file of `num_bytes`; if not,
    whether to try `again`, because the disk was merely too busy.
    """

    half: Half
    is_there: bool
    again: bool = False
    num_bytes: int = 0


class DiskOrders(Protocol):
    """Where nodes are held beyond memory. Every call returns at once; the prefix cache is told the
    outcome by `fetched`, `written` and `found`, and by `reading` how many bytes have come of what
    is under way.
    """

    def file_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """How large the file of these tensors is at most."""
        ...

    def read(self, orders: Sequence[ReadOrder]) -> None:
        """Read nodes; `fetched` is called for each."""
        ...

    def find(self, orders: Sequence[FindOrder]) -> None:
        """Look for files, here and in the store behind; `found` is called once."""
        ...

    def give_up(self, keys: Sequence[NodeKey]) -> None:
        """Read no more of these nodes; `fetched` is told what became of each."""
        ...

    def write(self, node: HalfNode) -> None:
        """Write half a node, after what was ordered before; `written` is called."""
        ...

    def remove(self, keys: Sequence[NodeKey]) -> None:
        """Remove both files of each node."""
        ...

    def remove_ends(self, keys: Sequence[NodeKey]) -> None:
        """Remove the file of each node's end."""
        ...

    def remove_others(self, num_bytes: int) -> None:
        """Remove so much of the files of other models, those first that were used longest ago."""
        ...

    def touch(self, keys: Sequence[NodeKey]) -> None:
        """Mark nodes as used now, for other processes too."""
        ...

    def quarantine(self, key: NodeKey) -> None:
        """Set aside a node that is not what its name says."""
        ...


class NoDisk:
    """A server without a cache directory: nothing is ever ordered from it."""

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
