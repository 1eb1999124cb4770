"""The state of every lane for the layers of one shard, in static tensors, and where its rows lie.

Owns keys, values, convolution windows, recurrent states and this device's copy of the page tables.
Knows no requests and decides nothing: pages are placed as the events of the page map say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from luceasync.kv.pages import CHUNK_TOKENS, PageEvent

LayerState = tuple[Tensor, Tensor]
TensorKey = tuple[str, int]  # kind of the snapshot's tensor, the model's layer


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
        layers = {kind: zip(*pair, strict=True) for kind, pair in self.stacked.items()}
        self.layers: list[LayerState] = [next(layers[kind]) for kind in kinds]
        # The identity to start with: exact attention never has to change it.
        pages = torch.arange(num_pages, dtype=torch.int32)
        self._pages = pages.repeat(num_lanes, 1)
        self.tables = self._pages.to(device, copy=True)  # [lanes, chunks]
        self._num_in_order = [num_pages] * num_lanes
        self._device = device

    @property
    def num_bytes(self) -> int:
        """Bytes of the state tensors."""
        return sum(t.numel() * t.element_size() for pair in self.layers for t in pair)

    def place(self, events: Iterable[PageEvent]) -> None:
        """Follow the page map."""
        for lane, chunk, page in ((e.lane, e.chunk, e.page) for e in events):
            if int(self._pages[lane, chunk]) != page:
                self._pages[lane, chunk] = page
                self.tables[lane, chunk] = page
            moved = page != chunk and chunk < self._num_in_order[lane]
            self._num_in_order[lane] = chunk if moved else self._num_in_order[lane]
            self._clear(lane, page)

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

    def views(
        self, lane: int, begin: int, end: int, *, with_state: bool
    ) -> dict[TensorKey, Tensor]:
        """What the lane holds of tokens `[begin, end)`, by kind and the model's layer: keys and
        values [end - begin, kv_heads, head_dim], and its recurrent state if `with_state`. Views of
        the lane where its pages are in order, copies where they are not.
        """
        places = self.places(lane, begin, end)
        found: dict[TensorKey, Tensor] = {}
        for layer, (kind, pair) in enumerate(
            zip(self._kinds, self.layers, strict=True), self._first_layer
        ):
            if kind == "attention":
                found["attn_k", layer], found["attn_v", layer] = (t[lane, places] for t in pair)
            elif with_state:
                found["conv", layer], found["delta", layer] = (t[lane] for t in pair)
        return found

    def write(self, lane: int, begin: int, end: int, tensors: Mapping[TensorKey, Tensor]) -> None:
        """Put what `views` gave, of this lane or another, into the lane."""
        places = self.places(lane, begin, end)
        for (kind, layer), tensor in tensors.items():
            target = self.layers[layer - self._first_layer][kind in ("attn_v", "delta")]
            target[lane, places if kind.startswith("attn") else ...] = tensor.to(
                self._device, non_blocking=True
            )

    def shapes(
        self, begin: int, end: int, *, with_state: bool
    ) -> dict[TensorKey, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of everything that `views` gives for such a span."""
        found: dict[TensorKey, tuple[tuple[int, ...], torch.dtype]] = {}
        for layer, (kind, pair) in enumerate(
            zip(self._kinds, self.layers, strict=True), self._first_layer
        ):
            names = ("attn_k", "attn_v") if kind == "attention" else ("conv", "delta")
            if kind == "attention" or with_state:
                for name, tensor in zip(names, pair, strict=True):
                    rows = (end - begin, *tensor.shape[2:]) if kind == "attention" else None
                    found[name, layer] = (rows or tuple(tensor.shape[1:]), tensor.dtype)
        return found

    def reset(self, lane: int) -> None:
        """Forget the lane's recurrent state; keys and values are masked by position and may
        stay.
        """
        for kind, (first, second) in zip(self._kinds, self.layers, strict=True):
            if kind == "delta":
                first[lane].zero_()
                second[lane].zero_()

    def close(self) -> None:
        """Let the tensors go. May be called twice."""
        self.layers.clear()
        self.stacked.clear()
