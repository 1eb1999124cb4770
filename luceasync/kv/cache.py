"""State of all lanes for one shard's layers, in static tensors, and the places of their rows.

Owns the tensors that kinds of layers declare and the device's copy of the page tables. Names no
kind of layer and makes no decision: pages move as the events of the page map specify.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from luceasync.kv.pages import CHUNK_TOKENS, PageEvent
from luceasync.kv.residents import Residents
from luceasync.kv.state import Role, StateLayout, StateTensor

LayerState = tuple[Tensor, ...]  # rows, then end state, each in the declared order
TensorKey = tuple[str, int]  # name of the state tensor, layer of the model
Shape = tuple[tuple[int, ...], torch.dtype]
Block = tuple[Tensor, int]  # bytes of a lane, and where they begin in a region of host memory

TOUCHED_BYTES = 512 << 20
PADDING = -1  # the extra lane among ends, models.pass_rows.NO_LANE


class LaneCache:
    """Static state tensors. Layers of equal layout are stacked in one tensor, so that a copy or
    commit of all layers is one operation. `layers` are views of `stacked`.

    Rows: [layers, lanes, places, ...]. End state: [layers, lanes + 1, ...]; the extra lane takes
    the writes of padding entries, and between two passes may hold a lane's earlier end. End state
    without a spare has no extra lane.
    """

    def __init__(
        self,
        keeps: Sequence[StateLayout],
        *,
        first_layer: int = 0,
        num_lanes: int,
        num_pages: int,
        dtype_of: Callable[[Role], torch.dtype],
        device: torch.device,
        blank: Callable[[Tensor], object] = Tensor.zero_,
    ) -> None:
        """`keeps`: the layout of each layer, from the model's `first_layer` on. `blank` clears the
        rows of a page before it is first written: on devices whose decode steps read whole pages,
        unwritten rows get weight 0, which undoes any value but NaN.
        """
        self._keeps = tuple(keeps)
        self._first_layer = first_layer
        self._blank = blank
        self._device = device
        self.stacked: dict[StateLayout, LayerState] = {}
        for kind in dict.fromkeys(self._keeps):
            num_layers = self._keeps.count(kind)
            places = (num_layers, num_lanes, num_pages * CHUNK_TOKENS)
            self.stacked[kind] = (
                *(_made(torch.empty, places, t, dtype_of, device) for t in kind.rows),
                *(
                    _made(torch.zeros, (num_layers, num_lanes + t.has_spare), t, dtype_of, device)
                    for t in kind.end
                ),
            )
        layers = {kind: zip(*stack, strict=True) for kind, stack in self.stacked.items()}
        self.layers: list[LayerState] = [next(layers[kind], ()) for kind in self._keeps]
        # Pages of each lane's resident chunks, in order. Starts as the identity, which exact
        # attention never changes.
        pages = torch.arange(num_pages, dtype=torch.int32)
        self.tables = pages.repeat(num_lanes, 1).to(device)  # [lanes, pages]
        self._listed = [[*range(num_pages)] for _ in range(num_lanes)]  # the host's copy of tables
        # Position minus row index of what is written next; 0 for padding.
        self.absent = torch.zeros(num_lanes + 1, dtype=torch.int32, device=device)
        self._told_absent = [0] * num_lanes
        self._residents = [Residents() for _ in range(num_lanes)]
        self._aside: tuple[int, int, int] | None = None  # lane, its tokens at the mark, and now
        self._row_shapes = self._shapes(self._rows_of, 3)
        self._state_shapes = self._shapes(self._ends_of, 2)
        self._bytes: dict[tuple[bool, int], dict[TensorKey, Tensor]] = {}
        # Rows [layers, lanes, places, ...] in the order of `row_shapes`, ends [layers, lanes (+ 1),
        # ...] in that of `state_shapes`.
        self.row_stacks = [stack for _, _, stack in self._rows_of()]
        self.state_stacks = [stack for _, _, stack in self._ends_of()]

    @property
    def has_spare_ends(self) -> bool:
        """Whether all end state has an extra lane."""
        return all(tensor.has_spare for kind in self._keeps for tensor in kind.end)

    @property
    def num_bytes(self) -> int:
        """Bytes of the state tensors."""
        return sum(t.numel() * t.element_size() for state in self.layers for t in state)

    def touch(self) -> None:
        """Write to the first lane's memory, up to TOUCHED_BYTES: on CPUs the first write to new
        memory costs more than the copy itself.
        """
        token_bytes = sum(stack[:, 0, :1].nbytes for stack in self.row_stacks)
        if token_bytes:
            for stack in self.row_stacks:
                stack[:, 0, : TOUCHED_BYTES // token_bytes].zero_()

    def place(self, events: Iterable[PageEvent]) -> None:
        """Apply events of the page map. A newly placed chunk is, or will be, written in full,
        except the lane's last one, whose page is blanked."""
        for lane, of_lane in itertools.groupby(events, lambda event: event.lane):
            residents, given = self._residents[lane], dict[int, int]()
            for event in of_lane:
                if event.page is None:
                    residents.drop(event.chunk)
                else:
                    residents.put(event.chunk, event.page)
                    given[event.chunk] = event.page
            self._list(lane)
            if residents.last in given:
                begin = given[residents.last] * CHUNK_TOKENS
                for stack in self.row_stacks:
                    self._blank(stack[:, lane, begin : begin + CHUNK_TOKENS])

    def num_absent_tokens(self, lane: int) -> int:
        """Position minus row index of what the lane writes next."""
        return self._residents[lane].num_absent_tokens

    def spans(self, lane: int, begin: int, end: int) -> list[tuple[int, int, bool]]:
        return self._residents[lane].spans(begin, end)
        """Tokens `[begin, end)` split into resident and absent spans."""

    def row_index(self, lane: int, token: int) -> int:
        """The number of resident rows before `token` of the lane."""
        return self._residents[lane].row_index(token)

    def places(self, lane: int, begin: int, end: int) -> slice | Tensor:
        """Places of the lane's rows `[begin, end)`: a slice while pages are in order, otherwise
        int64 indices."""
        residents = self._residents[lane]
        if residents.is_in_order(end):
            return slice(begin, end)
        runs = [torch.arange(run.start, run.stop) for run in residents.runs(begin, end)]
        places = torch.cat([torch.empty(0, dtype=torch.int64), *runs])
        # Not blocking: the driver first copies pageable memory to its own buffer.
        return places.to(self._device, non_blocking=True)

    def runs(self, lane: int, begin: int, end: int) -> list[range]:
        """Places of the lane's tokens `[begin, end)`, all of which are resident, as few ranges as
        possible.
        """
        residents = self._residents[lane]
        first, last = residents.row_index(begin), residents.row_index(end)
        assert last - first == end - begin, f"not all of [{begin}, {end}) is resident: {residents}"
        return residents.runs(first, last)

    def row_shapes(self, num_tokens: int) -> dict[TensorKey, Shape]:
        """Shapes of the rows of `num_tokens` tokens: [num_tokens, ...] each."""
        return {
            key: ((num_tokens, *shape), dtype) for key, (shape, dtype) in self._row_shapes.items()
        }

    def state_shapes(self) -> dict[TensorKey, Shape]:
        """Shapes of a lane's end state, wider dtypes first."""
        return self._state_shapes

    def row_bytes(self, lane: int) -> dict[TensorKey, Tensor]:
        """The lane's rows as uint8 [bytes], in the order of `row_shapes`."""
        return self._lane_bytes(lane, ends=False)

    def state_bytes(self, lane: int) -> dict[TensorKey, Tensor]:
        """The lane's end state as uint8 [bytes], in the order of `state_shapes`."""
        return self._lane_bytes(lane, ends=True)

    def row_blocks(self, lane: int, runs: Sequence[range]) -> Iterator[Block]:
        """The bytes of the lane's rows at places `runs`, with their offsets in a region that holds
        the tensors one after the other, in the order of `row_shapes`. May be iterated in another
        thread.
        """
        sizes = [total_bytes([shape]) for shape in self._row_shapes.values()]
        return _blocks(self.row_bytes(lane).values(), sizes, runs)

    def rows_of(self, name: str, layer: int) -> Tensor:
        """The tensor `name` of a layer's rows: [lanes, places, ...]."""
        kind = self._keeps[layer - self._first_layer]
        names = [tensor.name for tensor in kind.rows]
        return self.layers[layer - self._first_layer][names.index(name)]

    def copy_end_aside(self, lane: int) -> None:
        """Copy the lane's end state to the padding lane; every end state must have one."""
        for stack in self.state_stacks:
            stack[:, PADDING] = stack[:, lane]

    def note_end_aside(self, lane: int, num_tokens: int, num_now: int) -> None:
        """Record that the padding lane holds the lane's end state after its first `num_tokens`
        tokens, of `num_now`."""
        self._aside = lane, num_tokens, num_now

    def begin_pass(self) -> None:
        """Forget the state set aside: padding entries are about to overwrite it."""
        self._aside = None

    def end_after(self, lane: int, num_tokens: int) -> int:
        """The index of the end state after `num_tokens` tokens: the lane's own, or the padding lane
        if it was set aside there.
        """
        if self._aside is None or self._aside[0] != lane:
            return lane
        assert self.has_spare_ends, "no end is set aside"
        _, then, now = self._aside
        assert num_tokens in (then, now), f"{num_tokens} tokens; ends after {then} and {now}"
        return PADDING if num_tokens == then else lane

    def reset(self, lane: int) -> None:
        """Clear the lane's end state and its list of resident chunks. Rows stay: they are masked by
        row index.
        """
        self._residents[lane].clear()
        self._list(lane)
        for stack in self.state_stacks:
            stack[:, lane].zero_()

    def close(self) -> None:
        """Free the tensors. May be called twice."""
        self.layers.clear()
        self.stacked.clear()
        self.row_stacks.clear()
        self.state_stacks.clear()
        self._bytes.clear()

    def _list(self, lane: int) -> None:
        """Update the device's page table and absent count of the lane, if they differ."""
        residents, listed = self._residents[lane], self._listed[lane]
        pages = [*residents.pages]
        if listed[: len(pages)] != pages:
            listed[: len(pages)] = pages
            self.tables[lane] = torch.tensor(listed, dtype=torch.int32)
        if self._told_absent[lane] != residents.num_absent_tokens:
            self.absent[lane] = self._told_absent[lane] = residents.num_absent_tokens

    def _lane_bytes(self, lane: int, *, ends: bool) -> dict[TensorKey, Tensor]:
        """Byte views, cached, because they are needed between steps of other lanes."""
        if (ends, lane) not in self._bytes:
            stacks = self._ends_of() if ends else self._rows_of()
            self._bytes[ends, lane] = {
                (tensor.name, layer): stack[i, lane].view(-1).view(torch.uint8)
                for kind, tensor, stack in stacks
                for i, layer in enumerate(self._layers_of(kind))
            }
        return self._bytes[ends, lane]

    def _shapes(
        self, stacks: Callable[[], list[tuple[StateLayout, StateTensor, Tensor]]], num_outer: int
    ) -> dict[TensorKey, Shape]:
        return {
            (tensor.name, layer): (tuple(stack.shape[num_outer:]), stack.dtype)
            for kind, tensor, stack in stacks()
            for layer in self._layers_of(kind)
        }

    def _rows_of(self) -> list[tuple[StateLayout, StateTensor, Tensor]]:
        """Stacks of rows in host memory's order: all layers of a tensor, then the next tensor."""
        return [
            (kind, tensor, stack)
            for kind, stacks in self.stacked.items()
            for tensor, stack in zip(kind.rows, stacks, strict=False)
        ]

    def _ends_of(self) -> list[tuple[StateLayout, StateTensor, Tensor]]:
        """Stacks of end state in host memory's order: wider dtypes first, so each is aligned."""
        found = [
            (kind, tensor, stack)
            for kind, stacks in self.stacked.items()
            for tensor, stack in zip(kind.end, stacks[len(kind.rows) :], strict=True)
        ]
        return sorted(found, key=lambda entry: -entry[2].element_size())

    def _layers_of(self, kind: StateLayout) -> list[int]:
        """Layers of the model with this layout, in the order of its stacks."""
        return [i for i, other in enumerate(self._keeps, self._first_layer) if other == kind]


def total_bytes(shapes: Iterable[Shape]) -> int:
    """Bytes of tensors of these shapes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def _made(
    make: Callable[..., Tensor],
    outer: tuple[int, ...],
    tensor: StateTensor,
    dtype_of: Callable[[Role], torch.dtype],
    device: torch.device,
) -> Tensor:
    return make((*outer, *tensor.shape), dtype=dtype_of(tensor.role), device=device)


def _blocks(
    sources: Iterable[Tensor], row_bytes: Iterable[int], runs: Sequence[range]
) -> Iterator[Block]:
    at = 0
    for source, size in zip(sources, row_bytes, strict=True):
        for run in runs:
            block = source[run.start * size : run.stop * size]
            yield block, at
            at += block.numel()
