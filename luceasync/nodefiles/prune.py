"""Which nodes go where no server decides: the longest unused first, and never one that another
needs.

Pure; whoever asks removes the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from luceasync.nodefiles.listing import NodeMeta

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
