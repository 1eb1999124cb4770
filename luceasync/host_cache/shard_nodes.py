"""What a span of tokens left behind in one shard: saved from a lane, restored into another.

Owns the tensors of saved nodes, in host memory, and their names. Does not know keys of nodes, other
shards or streams; a tensor is named by its absolute layer, so that any split can adopt it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.cyext.names import format_name
from luceasync.host_cache.absent_rows import AbsentRows
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copies import LaneCopies, SaveTicket
from luceasync.host_cache.copy_stream import Pair, Ticket, joined
from luceasync.host_cache.nodes import ChainedNode, NodeSizes, Span
from luceasync.kv.cache import LaneCache, Shape, TensorKey, total_bytes
from luceasync.kv.state import Role, StateLayout


class _RegionTensors:
    """Tensors one after the other in a region of memory, as views, or as uint8 [bytes]."""

    def __init__(self, region: memoryview | None, shapes: Mapping[TensorKey, Shape]) -> None:
        self._region = region
        self._shapes = shapes
        self._tensors: dict[TensorKey, Tensor] | None = None

    def tensors(self) -> dict[TensorKey, Tensor]:
        if self._tensors is None:  # cached: a paged lane that is restored holds hundreds
            shapes = self._shapes
            self._tensors = {
                key: part.view(shapes[key][1]).view(shapes[key][0])
                for key, part in self.bytes().items()
            }
        return self._tensors

    def bytes(self) -> dict[TensorKey, Tensor]:
        if self._region is None:
            return {}
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values()]
        parts = torch.frombuffer(self._region, dtype=torch.uint8).split_with_sizes(sizes)
        return dict(zip(self._shapes, parts, strict=True))


class _AdoptedTensors:
    """Tensors that were adopted from anywhere."""

    def __init__(self, tensors: Mapping[TensorKey, Tensor]) -> None:
        self._tensors = dict(tensors)

    def tensors(self) -> dict[TensorKey, Tensor]:
        return self._tensors

    def bytes(self) -> dict[TensorKey, Tensor]:
        return {key: tensor.view(-1).view(torch.uint8) for key, tensor in self._tensors.items()}


NO_TENSORS = _AdoptedTensors({})


@dataclass(slots=True)
class ShardNode:
    """`rows`: keys and values of the span; `state`: the recurrent state at its end, if there is
    one. `arrival`: the ticket of the save; until it is done, the tensors must not be read.
    """

    rows: _RegionTensors | _AdoptedTensors
    state: _RegionTensors | _AdoptedTensors
    arrival: SaveTicket | None


class ShardContents:
    """The nodes of one shard, as Contents. Saved data lie flat in `memory`: a region for the span
    and one for the state at its end, so that either can be freed alone. Synchronous; engine thread
    only."""

    def __init__(
        self, cache: LaneCache, shard: int, memory: HostMemory, copies: LaneCopies
    ) -> None:
        """Takes ownership of `copies`."""
        self.absent = AbsentRows(cache, copies)
        self._cache = cache
        self._shard = shard
        self._memory = memory
        self._copies = copies
        self._row_bytes = {k: total_bytes([shape]) for k, shape in cache.row_shapes(1).items()}
        self.sizes = NodeSizes(
            token_bytes=total_bytes(cache.row_shapes(1).values()),
            state_bytes=total_bytes(cache.state_shapes().values()),
        )

    def __repr__(self) -> str:
        return f"shard {self._shard}"

    def shapes(self, span: Span) -> dict[str, Shape]:
        shapes = self._cache.row_shapes(span.end - span.begin)
        shapes |= self._cache.state_shapes() if span.with_state else {}
        return {self._name(key): shape for key, shape in shapes.items()}

    @torch.inference_mode()
    def save(self, lane: int, span: Span) -> tuple[ShardNode, Ticket]:
        """On a GPU the copies are only queued."""
        rows, state = (
            self._memory.allocate(size) if size else None for size in self.sizes.of(span)
        )
        end = self._cache.end_after(lane, span.end) if span.with_state else lane
        flat = _RegionTensors(rows, self._cache.row_shapes(span.end - span.begin))
        if self._cache.num_absent_tokens(lane):
            runs, rows_at = self._runs(lane, span)
            arrival = self._copies.save(lane, runs, rows, state, end, rows_at)
            self.absent.copy(lane, span.begin, flat.tensors())
        else:
            runs = self._cache.runs(lane, span.begin, span.end)
            arrival = self._copies.save(lane, runs, rows, state, end)
        return ShardNode(flat, _RegionTensors(state, self._cache.state_shapes()), arrival), arrival

    def _runs(self, lane: int, span: Span) -> tuple[list[range], list[int]]:
        """Places of the span's rows that have pages, and the row where each run begins."""
        runs: list[range] = []
        rows_at: list[int] = []
        for begin, end, is_here in self._cache.spans(lane, span.begin, span.end):
            for run in self._cache.runs(lane, begin, end) if is_here else ():
                runs.append(run)
                rows_at.append(begin - span.begin)
                begin += len(run)
        return runs, rows_at

    @torch.inference_mode()
    def restore(
        self, lane: int, chain: Sequence[ChainedNode[ShardNode]], num_tokens: int
    ) -> Ticket:
        """On a GPU the copies are queued, and later work on the lane follows them."""
        targets = self._cache.row_bytes(lane) | self._cache.state_bytes(lane)
        is_paged = self._cache.num_absent_tokens(lane) > 0
        parts = [
            (node.rows, self._cache.runs(lane, span.begin, min(span.end, num_tokens)))
            for span, node in ([] if is_paged else chain)
        ]
        state = chain[-1].content.state
        saves = [node.arrival for _, node in chain]
        arrivals = [arrival for arrival in saves if arrival is not None and not arrival.is_done]
        memory = [state, *[rows for rows, _ in parts]]
        pairs = _pairs(targets, parts, state, self._row_bytes)
        ticket = self._copies.restore(lane, pairs, memory, arrivals)
        return joined([ticket, self.absent.fill(lane, num_tokens)]) if is_paged else ticket

    def export(self, span: Span, content: ShardNode) -> dict[str, Tensor]:
        if content.arrival is not None:
            content.arrival.wait()
        tensors = content.rows.tensors() | content.state.tensors()
        return {self._name(key): tensor for key, tensor in tensors.items()}

    def adopt(self, span: Span, tensors: Mapping[str, Tensor]) -> ShardNode:
        """Nothing is copied."""
        rows = {key: tensors[self._name(key)] for key in self._cache.row_shapes(0)}
        at_end = self._cache.state_shapes() if span.with_state else {}
        state = {key: tensors[self._name(key)] for key in at_end}
        return ShardNode(_AdoptedTensors(rows), _AdoptedTensors(state), None)

    def drop(self, content: ShardNode, *, state_only: bool) -> None:
        """The memory is freed with the last view of it."""
        content.state = NO_TENSORS
        if not state_only:
            content.rows = NO_TENSORS

    def hold(self, lane: int, span: Span, content: ShardNode, end: int) -> None:
        tensors = content.rows.tensors()
        self.absent.hold(lane, span.begin, end, tensors, content.arrival)

    def release(self, lane: int) -> None:
        self.absent.reset(lane)

    def close(self) -> None:
        self._copies.close()
        self.absent.close()

    def _name(self, key: TensorKey) -> str:
        return format_name(self._shard, *key)


def _pairs(
    targets: Mapping[TensorKey, Tensor],
    parts: Sequence[tuple[_RegionTensors | _AdoptedTensors, Sequence[range]]],
    state: _RegionTensors | _AdoptedTensors,
    row_bytes: Mapping[TensorKey, int],
) -> Iterator[Pair]:
    """Bytes of the lane, `targets`, and their sources: the `state`, and the rows of each node,
    which go to the places of `runs` as far as these reach."""
    for key, source in state.bytes().items():
        yield targets[key], source
    for rows, runs in parts:
        for key, source in rows.bytes().items():
            size, at = row_bytes[key], 0
            for run in runs:
                end = at + len(run) * size
                yield targets[key][run.start * size : run.stop * size], source[at:end]
                at = end


class NodeLayout:
    """The tensors of a node of one stage, and the regions in which they lie, in order: what the
    layers of each shard keep of a span and at its end. Needs no lanes."""

    def __init__(
        self,
        shards: Mapping[int, tuple[int, Sequence[StateLayout]]],
        dtype_of: Callable[[Role], torch.dtype],
    ) -> None:
        """`shards`: by number, the first layer of each and what its layers keep."""
        self._caches = {
            shard: LaneCache(
                keeps,
                first_layer=first_layer,
                num_lanes=1,
                num_pages=1,
                dtype_of=dtype_of,
                device=torch.device("meta"),  # shapes alone, no memory
            )
            for shard, (first_layer, keeps) in shards.items()
        }
        self.sizes = NodeSizes(
            sum(total_bytes(cache.row_shapes(1).values()) for cache in self._caches.values()),
            sum(total_bytes(cache.state_shapes().values()) for cache in self._caches.values()),
        )

    def shapes(self, span: Span) -> dict[str, Shape]:
        """The tensors of a node of the span, in the order of `region_bytes`."""
        found: dict[str, Shape] = {}
        for shard, cache in self._caches.items():
            own = cache.row_shapes(span.end - span.begin)
            own |= cache.state_shapes() if span.with_state else {}
            found |= {format_name(shard, *key): shape for key, shape in own.items()}
        return found

    def region_bytes(self, span: Span) -> list[tuple[int, bool]]:
        """For each region that shards allocate when they save the span, in order: its bytes, and
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
