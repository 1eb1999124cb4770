"""Maintenance of a cache directory without a model: list, verify and remove nodes.

Its calls block. Servers may use the directory meanwhile: a file that is gone is a miss to them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Literal

from luceasync.disk_cache.codec import EndKinds, Half, NodeHeader
from luceasync.disk_cache.directory import QUARANTINE, NodeDirectory
from luceasync.disk_cache.files import FileSystem, allocate
from luceasync.disk_cache.listing import Listing, NodeMeta, list_nodes, namespaces
from luceasync.disk_cache.reader import (
    NodeFile,
    read_header,
    read_node,
    read_tokens,
    with_own_end,
)
from luceasync.errors import ConfigError, CorruptNode, ForeignNode

NodeState = Literal["whole", "damaged", "foreign", "unreadable", "gone"]
Name = tuple[str, str]  # namespace and key
NOWHERE: Name = ("", "nowhere")  # in place of a parent that a node cannot continue


@dataclass(frozen=True, slots=True)
class NamespaceTotal:
    """The number, size and last use of a namespace's nodes; `allocated_bytes`: what the disk holds
    of their files, less than `num_bytes` for sparse ones.
    """

    namespace: str
    num_nodes: int
    num_bytes: int
    last_used_s: float
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of reading every byte of a node; `detail` says what is wrong."""

    namespace: str
    key: str
    state: NodeState
    detail: str = ""


class Upkeep:
    """All namespaces under `root`. Methods raise OSError if the disk fails as a whole."""

    def __init__(self, root: Path, end_kinds: EndKinds = frozenset()) -> None:
        """`end_kinds`: see luceasync.disk_cache.codec; of any model. Raises ConfigError if the
        directory does not exist.
        """
        if not root.is_dir():
            raise ConfigError(f"--kv-cache-dir {root}: expected an existing directory")
        self.root = root
        self._files = FileSystem()
        self._end_kinds = end_kinds

    def namespaces(self) -> list[str]:
        """The names of the directories that may hold nodes."""
        return [path.name for path in namespaces(self._files, self.root)]

    def totals(self) -> list[NamespaceTotal]:
        """Totals of each namespace that has nodes, by names and sizes alone; last used first."""
        totals = []
        for namespace in self.namespaces():
            nodes = self._look(namespace, opening=False)
            if nodes:
                num_bytes = sum(node.num_bytes for node in nodes)
                last_used_s = max(node.last_used_s for node in nodes)
                allocated_bytes = sum(node.allocated_bytes for node in nodes)
                totals.append(
                    NamespaceTotal(namespace, len(nodes), num_bytes, last_used_s, allocated_bytes)
                )
        return sorted(totals, key=lambda total: -total.last_used_s)

    def nodes(self, namespace: str) -> list[NodeMeta]:
        """The nodes with valid headers and tokens, and those of other schemas. Raises OSError if
        one cannot be opened now: its children would seem to have no parent.
        """
        return self._look(namespace, opening=True)

    def headers(self, namespace: str, key: str) -> list[NodeHeader]:
        """The headers of the node's files: of its rows, and of its end if there is one. Raises
        CorruptNode, ForeignNode and OSError.
        """
        rows, end = (self._directory(namespace).path(key, half=half) for half in Half)
        headers = [read_tokens(self._files, rows, namespace, self._end_kinds)[0]]
        with contextlib.suppress(FileNotFoundError):
            headers.append(read_header(self._files, end, namespace, self._end_kinds))
        return headers

    def keys(self, namespace: str) -> list[str]:
        """The keys of all files that are named like nodes, whatever they hold."""
        listing = list_nodes(self._files, self.root / namespace, opening=None)
        damaged = (path.stem for path in listing.damaged)
        return sorted({*listing.nodes, *listing.ends, *damaged})

    def verify(self, namespace: str, key: str) -> Verdict:
        """Read every byte of the node's files; damaged ones are moved to the quarantine."""
        directory = self._directory(namespace)
        path, end_path = (directory.path(key, half=half) for half in Half)
        try:
            node = with_own_end(
                self._read(namespace, path), lambda: self._read(namespace, end_path)
            )
        except FileNotFoundError:
            return Verdict(namespace, key, "gone")
        except ForeignNode as error:
            return Verdict(namespace, key, "foreign", str(error))
        except CorruptNode as error:
            directory.set_aside(path)
            return Verdict(namespace, key, "damaged", str(error))
        except (OSError, MemoryError) as error:
            return Verdict(namespace, key, "unreadable", str(error) or "out of memory")
        if isinstance(node.end_fault, CorruptNode):
            directory.set_aside(end_path)
            return Verdict(namespace, key, "damaged", f"its end alone: {node.end_fault}")
        return Verdict(namespace, key, "whole")

    def remove(self, namespace: str, key: str) -> int:
        """Remove the node, its end too; the bytes that they took."""
        return self._directory(namespace).remove(key)

    def shed(self, names: AbstractSet[Name], num_bytes: int) -> int:
        """Remove so many bytes of the named nodes, as `prunable` orders them; the bytes that were
        freed.
        """
        nodes = [
            node
            for namespace in {namespace for namespace, _ in names}
            for node in self._nodes_at_hand(namespace)
            if (namespace, node.key) in names
        ]
        held_bytes = sum(node.num_bytes for node in nodes)
        gone = prunable(nodes, budget_bytes=held_bytes - num_bytes)
        return sum(self.remove(node.namespace, node.key) for node in gone)

    def _nodes_at_hand(self, namespace: str) -> list[NodeMeta]:
        """All nodes by name and size, and of those that can be read what they continue."""
        directory = self.root / namespace
        unread = list_nodes(self._files, directory, opening=None).whole
        return [
            *(unread | list_nodes(self._files, directory, opening=self._end_kinds).whole).values()
        ]

    def clear(self, namespace: str) -> tuple[int, int]:
        """Remove all nodes of the namespace and its quarantine; the number of nodes and their
        bytes. Nothing else is removed.
        """
        listing = self._listing(namespace, opening=False)
        keys = {*listing.nodes, *listing.ends}
        num_bytes = sum(self.remove(namespace, key) for key in keys)
        quarantine = self.root / namespace / QUARANTINE
        with contextlib.suppress(FileNotFoundError):
            for entry in self._files.entries(quarantine):
                if not entry.is_dir(follow_symlinks=False):
                    self._files.remove(quarantine / entry.name)
        for directory in (quarantine, quarantine.parent):
            with contextlib.suppress(OSError):  # it holds other files, or is in use
                directory.rmdir()
        return len(listing.nodes), num_bytes

    def _read(self, namespace: str, path: Path) -> NodeFile:
        return read_node(
            self._files,
            path,
            namespace,
            end_kinds=self._end_kinds,
            with_end=True,
            allocate=allocate,
            is_cancelled=lambda: False,
        )

    def _look(self, namespace: str, *, opening: bool) -> list[NodeMeta]:
        return list(self._listing(namespace, opening=opening).whole.values())

    def _listing(self, namespace: str, *, opening: bool) -> Listing:
        kinds = self._end_kinds if opening else None
        listing = list_nodes(self._files, self.root / namespace, opening=kinds)
        if listing.faults:
            raise OSError(listing.faults[0])
        return listing

    def _directory(self, namespace: str) -> NodeDirectory:
        return NodeDirectory(self._files, self.root, namespace, 0, self._end_kinds)


def prunable(
    nodes: Iterable[NodeMeta], *, budget_bytes: int | None = None, unused_since_s: float = 0.0
) -> list[NodeMeta]:
    """The nodes to remove where no server decides, in this order: those that were last used before
    `unused_since_s`, and as many as it takes for the rest to fit `budget_bytes`. Pure.

    A node is removed only after all of its children. Those without a chain to the root, which are
    of no use, come first, files that continue each other in a cycle among them.
    """
    by_name = {(node.namespace, node.key): node for node in nodes}
    parents = {name: _parent(node) for name, node in by_name.items()}
    parents |= dict.fromkeys(_in_cycles(parents), NOWHERE)
    usable = _usable(by_name, parents)
    num_children = Counter(parents.values())
    held_bytes = sum(node.num_bytes for node in by_name.values())

    def entry(name: Name) -> tuple[bool, float, Name]:
        return name in usable, by_name[name].last_used_s, name

    heap = [entry(name) for name in by_name if not num_children[name]]
    heapify(heap)
    gone: list[NodeMeta] = []
    while heap:
        name = heappop(heap)[2]
        node = by_name[name]
        is_too_much = budget_bytes is not None and held_bytes > budget_bytes
        if not is_too_much and node.last_used_s >= unused_since_s:
            continue
        gone.append(node)
        held_bytes -= node.num_bytes
        parent = parents[name]
        num_children[parent] -= 1
        if parent in by_name and not num_children[parent]:
            heappush(heap, entry(parent))
    return gone


def _parent(node: NodeMeta) -> Name:
    """The name of the node's parent; ("", "") for none."""
    parent = node.metadata.parent if node.metadata is not None else ""
    return (node.namespace, parent) if parent else ("", "")


def _in_cycles(parents: Mapping[Name, Name]) -> set[Name]:
    """Nodes on a parent cycle, or above one: what is left after removing leaves repeatedly."""
    num_children = Counter(parents.values())
    left = set(parents)
    ends = [name for name in parents if not num_children[name]]
    while ends:
        name = ends.pop()
        left.discard(name)
        parent = parents[name]
        num_children[parent] -= 1
        if parent in parents and not num_children[parent]:
            ends.append(parent)
    return left


def _usable(nodes: Mapping[Name, NodeMeta], parents: Mapping[Name, Name]) -> set[Name]:
    """Nodes with a chain to the root, or whose chain is not known."""
    usable: set[Name] = {("", "")}

    def begin(name: Name) -> int:
        metadata = nodes[name].metadata
        return metadata.begin if metadata is not None else 0

    for name in sorted(nodes, key=begin):
        if parents[name] in usable:
            usable.add(name)
    return usable
