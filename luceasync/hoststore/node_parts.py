"""Which tensors a node of one group has, without the lanes that they come from; and where these
lie in memory that was given for them. Owns the order of both. Knows no process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from luceasync.cyext.names import format_name
from luceasync.hoststore.nodes import NodeSizes, Span
from luceasync.kv.cache import LaneCache, Shape, total_bytes
from luceasync.kv.state import Keeps, Role


class NodeParts:
    """Of each shard of a group: what its layers keep of a span and at its end."""

    def __init__(
        self,
        shards: Mapping[int, tuple[int, Sequence[Keeps]]],
        dtype_of: Callable[[Role], torch.dtype],
    ) -> None:
        """`shards`: by number, the first layer of each, and what its layers keep."""
        self._caches = {
            shard: LaneCache(
                keeps,
                first_layer=first_layer,
                num_lanes=1,
                num_pages=1,
                dtype_of=dtype_of,
                device=torch.device("meta"),  # shapes alone: it takes no memory
            )
            for shard, (first_layer, keeps) in shards.items()
        }
        self.sizes = NodeSizes(
            sum(total_bytes(cache.row_shapes(1).values()) for cache in self._caches.values()),
            sum(total_bytes(cache.state_shapes().values()) for cache in self._caches.values()),
        )

    def shapes(self, span: Span) -> dict[str, Shape]:
        """See Nodes; in the order of `region_bytes`."""
        found: dict[str, Shape] = {}
        for shard, cache in self._caches.items():
            kept = cache.row_shapes(span.end - span.begin)
            kept |= cache.state_shapes() if span.with_state else {}
            found |= {format_name(shard, *key): shape for key, shape in kept.items()}
        return found

    def region_bytes(self, span: Span) -> list[tuple[int, bool]]:
        """Of each region that shards ask for when they save the span, in order: its bytes, and
        whether it holds the state at the end.
        """
        found = []
        for cache in self._caches.values():
            rows = total_bytes(cache.row_shapes(span.end - span.begin).values())
            state = total_bytes(cache.state_shapes().values()) * span.with_state
            found += [(size, of_state) for size, of_state in ((rows, False), (state, True)) if size]
        return found


def tensors_in(regions: Sequence[memoryview], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The tensors that fill these regions, one after the other; nothing is copied."""
    parts = [torch.frombuffer(region, dtype=torch.uint8) for region in regions]
    found, at, begin = {}, 0, 0
    for name, (shape, dtype) in shapes.items():
        end = begin + total_bytes([(shape, dtype)])
        assert end <= len(parts[at]), f"{name} does not end in its region"
        found[name] = parts[at][begin:end].view(dtype).view(shape)
        at, begin = (at + 1, 0) if end == len(parts[at]) else (at, end)
    return found
