"""A directory of nodes looked after without a model: what is there, whether it is whole, and its
removal.

Its calls block. Servers may run on the directory meanwhile: to them a file that is gone is a miss.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Literal

from luceasync.disk_cache.codec import EndKinds, Half, NodeHeader
from luceasync.disk_cache.directory import QUARANTINE, NodeDirectory
from luceasync.disk_cache.files import FileSystem, allocate
from luceasync.disk_cache.listing import Listing, NodeMeta, look_into, namespaces
from luceasync.disk_cache.reader import (
    NodeFile,
    read_header,
    read_node,
    read_tokens,
    with_own_end,
)
from luceasync.errors import ConfigError, CorruptNode, ForeignNode

State = Literal["whole", "damaged", "foreign", "unreadable", "gone"]


@dataclass(frozen=True, slots=True)
class NamespaceTotal:
    """A namespace, and what its nodes amount to."""

    namespace: str
    num_nodes: int
    num_bytes: int
    last_used_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What reading every byte of a node came to; `detail` says what is wrong."""

    namespace: str
    key: str
    state: State
    detail: str = ""


class Upkeep:
    """All namespaces under `root`. Its methods raise OSError where the disk fails as a whole."""

    def __init__(self, root: Path, end_kinds: EndKinds = frozenset()) -> None:
        """`end_kinds`: see luceasync.disk_cache.codec; of any model. Raises ConfigError where there
        is no such directory.
        """
        if not root.is_dir():
            raise ConfigError(f"--kv-cache-dir {root}: expected a directory that is there")
        self.root = root
        self._files = FileSystem()
        self._end_kinds = end_kinds

    def namespaces(self) -> list[str]:
        """The names of the directories that may hold nodes."""
        return [path.name for path in namespaces(self._files, self.root)]

    def totals(self) -> list[NamespaceTotal]:
        """Each namespace that has nodes, from names and sizes alone; the last used first."""
        totals = []
        for namespace in self.namespaces():
            nodes = self._look(namespace, opening=False)
            if nodes:
                num_bytes = sum(node.num_bytes for node in nodes)
                last_used_s = max(node.last_used_s for node in nodes)
                totals.append(NamespaceTotal(namespace, len(nodes), num_bytes, last_used_s))
        return sorted(totals, key=lambda total: -total.last_used_s)

    def nodes(self, namespace: str) -> list[NodeMeta]:
        """The nodes whose headers and tokens are sound, and those of other schemas. Raises OSError
        where one cannot be opened now: what continues it would seem to have no parent.
        """
        return self._look(namespace, opening=True)

    def headers(self, namespace: str, key: str) -> list[NodeHeader]:
        """Those of the node's files: of its rows, and of its end where that has one. Raises
        CorruptNode, ForeignNode and OSError.
        """
        rows, end = (self._directory(namespace).path(key, half=half) for half in Half)
        headers = [read_tokens(self._files, rows, namespace, self._end_kinds)[0]]
        with contextlib.suppress(FileNotFoundError):
            headers.append(read_header(self._files, end, namespace, self._end_kinds))
        return headers

    def keys(self, namespace: str) -> list[str]:
        """What is named as nodes are, whatever it holds."""
        listing = look_into(self._files, self.root / namespace, opening=None)
        damaged = (path.stem for path in listing.damaged)
        return sorted({*listing.nodes, *listing.ends, *damaged})

    def verify(self, namespace: str, key: str) -> Verdict:
        """Read every byte of the node's files; what is damaged is moved to the quarantine."""
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
        """Remove the node, its end too; the bytes that they took up."""
        return self._directory(namespace).remove(key)

    def clear(self, namespace: str) -> tuple[int, int]:
        """Remove all nodes of the namespace and what was set aside there; how many nodes there
        were, and their bytes. Nothing else is removed.
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
            with contextlib.suppress(OSError):  # it holds what is not ours, or is being used
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
            is_given_up=lambda: False,
        )

    def _look(self, namespace: str, *, opening: bool) -> list[NodeMeta]:
        return list(self._listing(namespace, opening=opening).whole.values())

    def _listing(self, namespace: str, *, opening: bool) -> Listing:
        kinds = self._end_kinds if opening else None
        listing = look_into(self._files, self.root / namespace, opening=kinds)
        if listing.faults:
            raise OSError(listing.faults[0])
        return listing

    def _directory(self, namespace: str) -> NodeDirectory:
        return NodeDirectory(self._files, self.root, namespace, 0, self._end_kinds)


# Which nodes go where no server decides: the longest unused first, and never one that another
# needs. Pure; whoever asks removes the files.


Name = tuple[str, str]  # namespace and key
NOWHERE: Name = ("", "nowhere")  # in place of a parent that a node cannot continue


def prunable(
    nodes: Iterable[NodeMeta], *, budget_bytes: int | None = None, unused_since_s: float = 0.0
) -> list[NodeMeta]:
    """The nodes that go, in this order: those that were last used before `unused_since_s`, and as
    many as it takes for the rest to fit `budget_bytes`.

    A node goes only once all that continue it have gone. Those that have no chain to the root, and
    so are of no use, are the first; files that continue each other in a circle are of these.
    """
    by_name = {(node.namespace, node.key): node for node in nodes}
    parents = {name: _parent(node) for name, node in by_name.items()}
    parents |= dict.fromkeys(_in_circles(parents), NOWHERE)
    usable = _usable(by_name, parents)
    num_needing = Counter(parents.values())
    held_bytes = sum(node.num_bytes for node in by_name.values())

    def entry(name: Name) -> tuple[bool, float, Name]:
        return name in usable, by_name[name].last_used_s, name

    heap = [entry(name) for name in by_name if not num_needing[name]]
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
        num_needing[parent] -= 1
        if parent in by_name and not num_needing[parent]:
            heappush(heap, entry(parent))
    return gone


def _parent(node: NodeMeta) -> Name:
    """The name of the node that this one continues; ("", "") for none."""
    parent = node.metadata.parent if node.metadata is not None else ""
    return (node.namespace, parent) if parent else ("", "")


def _in_circles(parents: Mapping[Name, Name]) -> set[Name]:
    """Those that lead back to themselves: what is left when all that nothing continues has gone."""
    num_needing = Counter(parents.values())
    left = set(parents)
    ends = [name for name in parents if not num_needing[name]]
    while ends:
        name = ends.pop()
        left.discard(name)
        parent = parents[name]
        num_needing[parent] -= 1
        if parent in parents and not num_needing[parent]:
            ends.append(parent)
    return left


def _usable(nodes: Mapping[Name, NodeMeta], parents: Mapping[Name, Name]) -> set[Name]:
    """Those whose chain goes back to the root, and those of which that is not known."""
    usable: set[Name] = {("", "")}

    def begin(name: Name) -> int:
        metadata = nodes[name].metadata
        return metadata.begin if metadata is not None else 0

    for name in sorted(nodes, key=begin):
        if parents[name] in usable:
            usable.add(name)
    return usable
