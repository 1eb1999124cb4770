"""What a span of tokens left behind in one shard, taken out of a lane and put into another.

Owns the tensors of saved nodes, in host memory, and their names. Knows no tree, no file, no other
shard and no stream; a tensor is named by its absolute layer, so that any split can take it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from luceasync.cyext.names import format_name
from luceasync.hoststore.absent_rows import AbsentRows
from luceasync.hoststore.copy_stream import Pair
from luceasync.hoststore.host_rows import Arrival
from luceasync.hoststore.lane_copies import LaneCopies
from luceasync.hoststore.memory import HostMemory
from luceasync.hoststore.nodes import NodeSizes, Span
from luceasync.hoststore.tickets import Ticket, together
from luceasync.kv.cache import LaneCache, Shape, TensorKey, total_bytes
from luceasync.node_words import NodeKey


class _Flat:
    """Tensors one after the other in a region of memory; views of them are made when asked for."""

    def __init__(self, region: memoryview | None, shapes: Mapping[TensorKey, Shape]) -> None:
        self._region = region
        self._shapes = shapes

    def tensors(self) -> dict[TensorKey, Tensor]:
        if self._region is None:
            return {}
        sizes = [total_bytes([shape]) for shape in self._shapes.values()]
        parts = torch.frombuffer(self._region, dtype=torch.uint8).split(sizes)
        return {
            key: part.view(dtype).view(shape)
            for (key, (shape, dtype)), part in zip(self._shapes.items(), parts, strict=True)
        }


class _Given:
    """Tensors that lie where somebody else has put them."""

    def __init__(self, tensors: Mapping[TensorKey, Tensor]) -> None:
        self._tensors = dict(tensors)

    def tensors(self) -> dict[TensorKey, Tensor]:
        return self._tensors


NOTHING = _Given({})


@dataclass(slots=True)
class _Node:
    """`rows`: keys and values of the span; `state`: the recurrent state at its end, if it is
    kept. `arrival` of a node that was saved: until then the tensors may not be read.
    """

    span: Span
    rows: _Flat | _Given
    state: _Flat | _Given
    arrival: Arrival | None


class NodeStore:
    """Saved nodes of one shard. What is saved lies flat in `memory`: a region for the span, one for
    the state at its end, so that either goes by itself. Synchronous, engine thread only.
    """

    def __init__(
        self, cache: LaneCache, shard: int, memory: HostMemory, copies: LaneCopies
    ) -> None:
        self._cache = cache
        self._shard = shard
        self._memory = memory
        self._copies = copies
        self._sizes = NodeSizes(
            token_bytes=total_bytes(cache.row_shapes(1).values()),
            state_bytes=total_bytes(cache.state_shapes().values()),
        )
        self._nodes: dict[NodeKey, _Node] = {}
        self.absent = AbsentRows(cache, copies)

    def __repr__(self) -> str:
        return f"NodeStore(shard {self._shard}, {len(self._nodes)} nodes)"

    @property
    def sizes(self) -> NodeSizes:
        """See Nodes."""
        return self._sizes

    def shapes(self, span: Span) -> dict[str, Shape]:
        """See Nodes."""
        shapes = self._cache.row_shapes(span.end - span.begin)
        shapes |= self._cache.state_shapes() if span.with_state else {}
        return {self._name(key): shape for key, shape in shapes.items()}

    @torch.inference_mode()
    def save(self, lane: int, node: NodeKey, span: Span) -> Ticket:
        """See Nodes. On a GPU the copies are queued: nobody waits here. Raises MemoryError; nothing
        has changed then.
        """
        assert span.begin < span.end, f"no token in {span}"
        sizes = self._sizes.of(span)
        rows, state = (self._memory.allocate(size) if size else None for size in sizes)
        flat = _Flat(rows, self._cache.row_shapes(span.end - span.begin))
        if self._cache.num_absent_tokens(lane):
            runs, rows_at = self._runs(lane, span)
            arrival = self._copies.take_out(lane, runs, rows, state, rows_at)
            self.absent.copy(lane, span.begin, flat.tensors())
        else:
            runs = self._cache.runs(lane, span.begin, span.end)
            arrival = self._copies.take_out(lane, runs, rows, state)
        self._nodes[node] = _Node(span, flat, _Flat(state, self._cache.state_shapes()), arrival)
        return arrival

    def _runs(self, lane: int, span: Span) -> tuple[list[range], list[int]]:
        """Places of what is here of the span, and the row of the span at which each run begins."""
        runs: list[range] = []
        rows_at: list[int] = []
        for begin, end, is_here in self._cache.spans(lane, span.begin, span.end):
            for run in self._cache.runs(lane, begin, end) if is_here else ():
                runs.append(run)
                rows_at.append(begin - span.begin)
                begin += len(run)
        return runs, rows_at

    @torch.inference_mode()
    def restore(self, lane: int, nodes: Sequence[NodeKey], num_tokens: int) -> Ticket:
        """See Nodes; the lane's pages must be placed. On a GPU the copies are queued, and so is
        what uses the lane after them.
        """
        held = [self._nodes[node] for node in nodes]
        begins = [0, *[n.span.end for n in held]]
        assert [n.span.begin for n in held] == begins[:-1], f"a chain is expected, got {nodes}"
        last = held[-1].span
        assert last.begin < num_tokens <= last.end, f"{num_tokens} tokens do not end in {last}"
        whole = num_tokens == last.end and last.with_state
        assert whole or not self._cache.state_shapes(), f"no state at {num_tokens} in {last}"
        targets = self._cache.row_bytes(lane) | self._cache.state_bytes(lane)
        is_paged = self._cache.num_absent_tokens(lane) > 0
        parts = [
            (n.rows, self._cache.runs(lane, n.span.begin, min(n.span.end, num_tokens)))
            for n in ([] if is_paged else held)
        ]
        state = held[-1].state
        arrivals = [n.arrival for n in held if n.arrival is not None and not n.arrival.is_done]
        memory = [state, *[rows for rows, _ in parts]]
        ticket = self._copies.put_in(lane, _pairs(targets, parts, state), memory, arrivals)
        if not is_paged:
            return ticket
        return together([ticket, self.absent.fill(lane, num_tokens)])

    def span(self, node: NodeKey) -> Span:
        """See Nodes."""
        return self._nodes[node].span

    def hold(self, lane: int, node: NodeKey, end: int) -> None:
        """See Nodes."""
        held = self._nodes[node]
        self.absent.hold(lane, held.span.begin, end, held.rows.tensors(), held.arrival)

    def let_go(self, lane: int) -> None:
        """See Nodes."""
        self.absent.reset(lane)

    def use(self, lanes: Sequence[int]) -> None:
        """Call before a pass over these lanes is queued: it then runs after their restores, and
        after the saves of what they held before their reset.
        """
        self._copies.use(lanes)
        self.absent.use(lanes)

    def reset(self, lane: int) -> None:
        """Make the lane as if no token had ever run on it; its saves go on."""
        self._copies.rewrite(lane)
        self._cache.reset(lane)
        self.absent.reset(lane)

    def export(self, node: NodeKey) -> dict[str, Tensor]:
        """See Nodes."""
        held = self._nodes[node]
        if held.arrival is not None:
            held.arrival.wait()
        return {
            self._name(key): tensor
            for key, tensor in (held.rows.tensors() | held.state.tensors()).items()
        }

    def adopt(self, node: NodeKey, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """See Nodes."""
        rows = {key: tensors[self._name(key)] for key in self._cache.row_shapes(0)}
        kept = self._cache.state_shapes() if span.with_state else {}
        state = {key: tensors[self._name(key)] for key in kept}
        self._nodes[node] = _Node(span, _Given(rows), _Given(state), None)

    def drop(self, node: NodeKey, *, state_only: bool = False) -> None:
        """See Nodes."""
        held = self._nodes.get(node) if state_only else self._nodes.pop(node, None)
        if held is not None and state_only:
            held.span = replace(held.span, with_state=False)
            held.state = NOTHING

    def close(self) -> None:
        """Forget everything."""
        self._copies.close()
        self._nodes.clear()
        self.absent.close()

    def _name(self, key: TensorKey) -> str:
        return format_name(self._shard, *key)


def _pairs(
    targets: Mapping[TensorKey, Tensor],
    parts: Sequence[tuple[_Flat | _Given, Sequence[range]]],
    state: _Flat | _Given,
) -> Iterator[Pair]:
    """Bytes of the lane, `targets`, and what goes there: `state`, and of each node its rows, which
    go to the places of `runs` as far as these reach.
    """
    for key, tensor in state.tensors().items():
        yield targets[key], _bytes_of(tensor)
    for rows, runs in parts:
        for key, tensor in rows.tensors().items():
            source, at = _bytes_of(tensor), 0
            row_bytes = source.numel() // len(tensor)
            for run in runs:
                target = targets[key][run.start * row_bytes : run.stop * row_bytes]
                yield target, source[at : at + target.numel()]
                at += target.numel()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
