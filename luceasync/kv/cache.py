"""The state of every lane for the layers of one shard, in static tensors, and where its rows lie.

Owns keys, values, convolution windows, recurrent states and this device's copy of the page tables.
Knows no requests and decides nothing: pages are placed as the events of the page map say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from luceasync.kv.pages import CHUNK_TOKENS, PageEvent, num_chunks

LayerState = tuple[Tensor, Tensor]
TensorKey = tuple[str, int]  # kind of the snapshot's tensor, the model's layer
Shape = tuple[tuple[int, ...], torch.dtype]
Block = tuple[Tensor, int]  # bytes of a lane, where they begin in a region of host memory

# Of the lane that is given out first: new memory costs a CPU more than what is copied to it.
TOUCHED_BYTES = 512 << 20


class LaneCache:
    """Static state tensors, one pair a layer: `layers` are views of `stacked`, the pair of each
    kind with the layers of that kind in front.

    `attention_shape` = (kv_heads, head_dim): keys and values [lanes, places, kv_heads, head_dim] in
    `dtype`. `conv_shape` = (kernel - 1, channels) in `dtype` and `delta_shape` = (heads, key_dim,
    value_dim) in float32, both with an extra lane at the end for padding entries. `kinds` names
    each layer's pair, beginning with the model's layer `first_layer`.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        first_layer: int = 0,
        num_lanes: int,
        num_pages: int,
        attention_shape: tuple[int, int],
        conv_shape: tuple[int, int],
        delta_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kinds = tuple(kinds)
        self._first_layer = first_layer
        num_attention, num_delta = self._kinds.count("attention"), self._kinds.count("delta")
        places = (num_attention, num_lanes, num_pages * CHUNK_TOKENS, *attention_shape)
        states = (num_delta, num_lanes + 1)
        # All layers of a kind in one tensor: what concerns every layer is then one operation.
        self.stacked: dict[str, LayerState] = {
            "attention": (
                torch.empty(places, dtype=dtype, device=device),
                torch.empty(places, dtype=dtype, device=device),
            ),
            "delta": (
                torch.zeros((*states, *conv_shape), dtype=dtype, device=device),
                torch.zeros((*states, *delta_shape), device=device),
            ),
        }
        self._touch()
        layers = {kind: zip(*pair, strict=True) for kind, pair in self.stacked.items()}
        self.layers: list[LayerState] = [next(layers[kind]) for kind in kinds]
        # The identity to start with: exact attention never has to change it.
        pages = torch.arange(num_pages, dtype=torch.int32)
        self._pages = pages.repeat(num_lanes, 1)
        self.tables = self._pages.to(device, copy=True)  # [lanes, chunks]
        self._num_in_order = [num_pages] * num_lanes
        self._device = device
        self._row_shapes: dict[TensorKey, Shape] = {
            key: (tuple(tensor.shape[2:]), tensor.dtype)
            for key, tensor in self._tensors("attention")
        }
        self._state_shapes: dict[TensorKey, Shape] = {
            key: (tuple(tensor.shape[1:]), tensor.dtype) for key, tensor in self._tensors("delta")
        }
        self._bytes: dict[tuple[str, int], dict[TensorKey, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the state tensors."""
        return sum(t.numel() * t.element_size() for pair in self.layers for t in pair)

    def place(self, events: Iterable[PageEvent]) -> None:
        """Follow the page map. A lane's events give room to what is written next: every page in
        full, but for the last one.
        """
        for lane, of_lane in itertools.groupby(events, lambda event: event.lane):
            pages = self._pages[lane].tolist()
            for chunk, page in ((event.chunk, event.page) for event in of_lane):
                if pages[chunk] != page:
                    pages[chunk] = page
                    self._pages[lane, chunk] = page
                    self.tables[lane, chunk] = page
                moved = page != chunk and chunk < self._num_in_order[lane]
                self._num_in_order[lane] = chunk if moved else self._num_in_order[lane]
            self._clear(lane, page)

    def _touch(self) -> None:
        """On CPUs have the system give the first lane its pages now, as far as is worth it."""
        keys, values = self.stacked["attention"]
        row_bytes = 2 * keys[:, 0, :1].numel() * keys.element_size()
        if keys.device.type == "cpu" and row_bytes:
            for stack in (keys, values):
                stack[:, 0, : TOUCHED_BYTES // row_bytes].zero_()

    def _clear(self, lane: int, page: int) -> None:
        """On CPUs a decode step reads whole pages and gives what is not written yet no weight,
        which undoes any value but NaN. GPU kernels do not read it.
        """
        if self._device.type == "cpu":
            rows = slice(page * CHUNK_TOKENS, (page + 1) * CHUNK_TOKENS)
            for kind, (_, values) in zip(self._kinds, self.layers, strict=True):
                if kind == "attention":
                    values[lane, rows].zero_()

    def places(self, lane: int, begin: int, end: int) -> slice | Tensor:
        """Places of the lane's tokens `[begin, end)`: a slice while pages are in order, else
        int64.
        """
        if end <= self._num_in_order[lane] * CHUNK_TOKENS:
            return slice(begin, end)
        tokens = torch.arange(begin, end)
        pages = self._pages[lane, tokens // CHUNK_TOKENS].long()
        return (pages * CHUNK_TOKENS + tokens % CHUNK_TOKENS).to(self._device)

    def runs(self, lane: int, begin: int, end: int) -> list[range]:
        """Places of the lane's tokens `[begin, end)`, in order: as few ranges as there can be."""
        if end <= self._num_in_order[lane] * CHUNK_TOKENS:
            return [range(begin, end)]
        runs: list[range] = []
        for chunk in range(begin // CHUNK_TOKENS, num_chunks(end)):
            move = (int(self._pages[lane, chunk]) - chunk) * CHUNK_TOKENS
            first = max(begin, chunk * CHUNK_TOKENS) + move
            last = min(end, (chunk + 1) * CHUNK_TOKENS) + move
            if runs and runs[-1].stop == first:
                first = runs.pop().start
            runs.append(range(first, last))
        return runs

    def row_shapes(self, num_tokens: int) -> dict[TensorKey, Shape]:
        """What so many tokens leave behind: keys and values [num_tokens, kv_heads, head_dim]."""
        return {
            key: ((num_tokens, *shape), dtype) for key, (shape, dtype) in self._row_shapes.items()
        }

    def state_shapes(self) -> dict[TensorKey, Shape]:
        """Each tensor of a lane's recurrent state, those of wider numbers first."""
        return self._state_shapes

    def row_bytes(self, lane: int) -> dict[TensorKey, Tensor]:
        """The lane's keys and values, uint8 [bytes], in the order of `row_shapes`."""
        return self._lane_bytes("attention", lane)

    def state_bytes(self, lane: int) -> dict[TensorKey, Tensor]:
        """The lane's recurrent state, uint8 [bytes], in the order of `state_shapes`."""
        return self._lane_bytes("delta", lane)

    def row_blocks(self, lane: int, runs: Sequence[range]) -> Iterator[Block]:
        """The bytes of the lane's keys and values at places `runs`, in rising order: in a region
        each tensor's follow those of the one before, in the order of `row_shapes`. May be run
        through in another thread.
        """
        sizes = [total_bytes([shape]) for shape in self._row_shapes.values()]
        return _blocks(self.row_bytes(lane).values(), sizes, runs)

    @property
    def row_stacks(self) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, lanes, places, ...], in the order of `row_shapes`."""
        return self.stacked["attention"]

    @property
    def state_stacks(self) -> tuple[Tensor, Tensor]:
        """Recurrent states [layers, lanes + 1, ...], in the order of `state_shapes`."""
        conv, delta = self.stacked["delta"]
        return delta, conv

    def _lane_bytes(self, kind: str, lane: int) -> dict[TensorKey, Tensor]:
        """Made once for each lane: it is asked for between the steps of other lanes."""
        if (kind, lane) not in self._bytes:
            self._bytes[kind, lane] = {
                key: tensor[lane].view(-1).view(torch.uint8) for key, tensor in self._tensors(kind)
            }
        return self._bytes[kind, lane]

    def _tensors(self, kind: str) -> list[tuple[TensorKey, Tensor]]:
        """The layers' tensors of a kind, in the order in which they lie in host memory: all layers
        of one tensor, then all of the other.
        """
        pairs = [
            (layer, pair)
            for layer, (its_kind, pair) in enumerate(
                zip(self._kinds, self.layers, strict=True), self._first_layer
            )
            if its_kind == kind
        ]
        names = {"attention": (("attn_k", 0), ("attn_v", 1)), "delta": (("delta", 1), ("conv", 0))}
        return [((name, layer), pair[i]) for name, i in names[kind] for layer, pair in pairs]

    def reset(self, lane: int) -> None:
        """Forget the lane's recurrent state; keys and values are masked by position and may
        stay.
        """
        for stack in self.stacked["delta"]:
            stack[:, lane].zero_()

    def close(self) -> None:
        """Let the tensors go. May be called twice."""
        self.layers.clear()
        self.stacked.clear()
        self._bytes.clear()


def total_bytes(shapes: Iterable[Shape]) -> int:
    """What tensors of these shapes take up."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def _blocks(
    sources: Iterable[Tensor], row_bytes: Iterable[int], runs: Sequence[range]
) -> Iterator[Block]:
    at = 0
    for source, size in zip(sources, row_bytes, strict=True):
        for run in runs:
            block = source[run.start * size : run.stop * size]
            yield block, at
            at += block.numel()
