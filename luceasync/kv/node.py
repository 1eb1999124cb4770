"""What a span of tokens left behind in one shard, taken out of a lane and put into another.

Owns the tensors of saved nodes, in host memory, and their names. Knows no tree, no file and no
other shard; a tensor is named by its absolute layer, so that any split can take it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.cyext.names import format_name, parse_name, rename_table
from luceasync.errors import SnapshotMismatch
from luceasync.kv.cache import LaneCache


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[begin, end)` of a sequence; `with_state`: the recurrent state at `end` belongs to
    it.
    """

    begin: int
    end: int
    with_state: bool


def shares_of(tensors: Mapping[str, Tensor], owners: Sequence[range]) -> list[dict[str, Tensor]]:
    """The tensors of each owner's layers. Raises SnapshotMismatch for a tensor that is nobody's."""
    shares: list[dict[str, Tensor]] = [{} for _ in owners]
    for name, tensor in tensors.items():
        _, _, layer = parse_name(name)
        holders = [share for share, layers in zip(shares, owners, strict=True) if layer in layers]
        if not holders:
            raise SnapshotMismatch(f"{name}: there is no layer {layer}")
        holders[0][name] = tensor
    return shares


def renamed(tensors: Mapping[str, Tensor], begins: Sequence[int]) -> dict[str, Tensor]:
    """The tensors under the names of the split whose shards begin at layers `begins`.

    Nothing is copied. Raises SnapshotMismatch for names that are none, or one tensor twice.
    """
    try:
        table = rename_table(list(tensors), list(begins))
    except ValueError as error:
        raise SnapshotMismatch(str(error)) from None
    return {table[name]: tensor for name, tensor in tensors.items()}


class NodeStore:
    """Saved nodes of one shard."""

    def __init__(self, cache: LaneCache, shard: int) -> None:
        self._cache = cache
        self._shard = shard
        self._nodes: dict[str, tuple[Span, dict[str, Tensor]]] = {}
        self._pending: dict[str, torch.cuda.Event] = {}

    def __repr__(self) -> str:
        return f"NodeStore(shard {self._shard}, {len(self._nodes)} nodes)"

    def save(self, lane: int, node: str, span: Span) -> None:
        """Copy the span out of the lane. On a GPU the copies are queued: nobody waits here."""
        views = self._cache.views(lane, span.begin, span.end, with_state=span.with_state)
        tensors = {self._name(kind, layer): _to_host(t) for (kind, layer), t in views.items()}
        self._nodes[node] = (span, tensors)
        if self._cache.tables.is_cuda:
            self._pending[node] = torch.cuda.current_stream().record_event()

    def restore(self, lane: int, node: str) -> None:
        """Write the node into the lane; its pages must be placed."""
        span, tensors = self._nodes[node]
        self._wait(node)
        views = self._cache.views(lane, span.begin, span.end, with_state=span.with_state)
        self._cache.write(
            lane, span.begin, span.end, {key: tensors[self._name(*key)] for key in views}
        )

    def export(self, node: str) -> dict[str, Tensor]:
        """The node's tensors by name, complete; they belong to the node and are not to be
        changed.
        """
        self._wait(node)
        return dict(self._nodes[node][1])

    def check(self, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Raise SnapshotMismatch unless `tensors` are exactly this shard's for `span`."""
        wanted = self._cache.shapes(span.begin, span.end, with_state=span.with_state)
        expected = {self._name(kind, layer): shape for (kind, layer), shape in wanted.items()}
        if tensors.keys() != expected.keys():
            odd = sorted(tensors.keys() ^ expected.keys())
            raise SnapshotMismatch(
                f"shard {self._shard}: missing or unexpected tensors: {', '.join(odd[:4])}"
            )
        for name, (shape, dtype) in expected.items():
            found = tensors[name]
            if tuple(found.shape) != shape or found.dtype != dtype:
                raise SnapshotMismatch(
                    f"{name}: {found.dtype} {tuple(found.shape)}, expected {dtype} {shape}"
                )

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Own tensors that `check` has passed."""
        self._nodes[node] = (span, dict(tensors))

    def drop(self, node: str) -> None:
        """Forget the node, if it is here."""
        self._nodes.pop(node, None)
        self._pending.pop(node, None)

    def close(self) -> None:
        """Forget everything."""
        self._nodes.clear()
        self._pending.clear()

    def _name(self, kind: str, layer: int) -> str:
        return format_name(self._shard, kind, layer)

    def _wait(self, node: str) -> None:
        event = self._pending.pop(node, None)
        if event is not None:
            event.synchronize()


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; from a GPU into pinned memory, in the order of the stream."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
