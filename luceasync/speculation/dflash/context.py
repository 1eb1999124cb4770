"""A drafter's context: keys and values of each lane, in rings of fixed size.

Owns the places and the masks: position p is at place p % capacity, and which position a place holds
follows from the lane's end. Knows no weights. Reads nothing but device tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.speculation.dflash.draft_spec import DraftLayerSpec, DraftSpec

MIN_REACH = 256  # places


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Rows to write: `positions` int64 [entries, rows]; `kept` bool likewise; `ends` int64
    [entries], the ends of the lanes after them; `lanes` int64 [entries].
    """

    lanes: Tensor
    positions: Tensor
    kept: Tensor
    ends: Tensor

    @classmethod
    def of(cls, lanes: Tensor, begins: Tensor, counts: Tensor, num_rows: int) -> ContextRows:
        """Rows `[begins, begins + counts)`; the others of `num_rows` are not kept."""
        row = torch.arange(num_rows, device=begins.device)
        kept = row < counts[:, None]
        return cls(lanes.long(), begins[:, None] + row, kept, begins + counts)


def places(rows: ContextRows, capacity: int) -> Tensor:
    """int64 [entries, rows]: where rows go. Rows that are not kept, or would be overwritten by
    later rows of the same write, go to the place behind the ring, which is never read.
    """
    stays = rows.kept & (rows.positions >= (rows.ends - capacity)[:, None])
    return torch.where(stays, rows.positions % capacity, capacity)


def reach_for(position: int) -> int:
    """How many places to read for a block that begins at `position`: rounded up to one of two sizes
    in each octave, so that few shapes come up.
    """
    reach = MIN_REACH
    while reach < position:
        reach = reach * 3 // 2 if reach & (reach - 1) == 0 else reach // 3 * 4
    return reach


def held_positions(begins: Tensor, capacity: int, num_places: int) -> Tensor:
    """int64 [entries, num_places]: the newest position before `begins` that a place can hold;
    negative if there is none yet.
    """
    last = begins[:, None] - 1
    place = torch.arange(num_places, device=begins.device)
    return last - (last - place) % capacity


def visible(
    layer: DraftLayerSpec, held: Tensor, floors: Tensor, begins: Tensor, num_rows: int
) -> Tensor:
    """bool [entries, num_rows, num_rows + places]: what each row of a block attends to, the block
    first.

    `held` of `held_positions`; `floors` int64 [entries]: context below them does not exist, or is
    hidden. Row r is at position begins + r.
    """
    row = torch.arange(num_rows, device=begins.device)
    context = (held >= floors[:, None])[:, None].expand(-1, num_rows, -1)
    apart = row[:, None] - row
    block = torch.ones_like(apart, dtype=torch.bool)
    if layer.is_causal:
        block = apart >= 0
    if layer.window is not None:
        oldest = begins[:, None] + row - layer.window  # the newest position outside of the window
        context = context & (held[:, None] > oldest[:, :, None])
        block = block & (apart.abs() < layer.window)
    return torch.cat([block.expand(begins.shape[0], -1, -1), context], 2)


class ContextRing:
    """Keys and values of those layers whose rings are equally large.

    `keys`, `values`: [layers, lanes + 1, block + capacity + 1, kv_heads, head_dim]: the rows of the
    block that is being proposed, so that they and the context are read at once, then the ring. The
    extra lane, index -1, and the extra place take what is dropped. `layers` are those of the model,
    `index` the same on the device.

        [ block | ring: place p % capacity | spare ]
    """

    def __init__(
        self,
        spec: DraftSpec,
        layers: list[int],
        *,
        num_lanes: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.capacity = capacity
        self._block = spec.block
        self.index = torch.tensor(layers, device=device)
        heads = (spec.attention.num_kv_heads, spec.attention.head_dim)
        shape = (len(layers), num_lanes + 1, spec.block + capacity + 1, *heads)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, keys: Tensor, values: Tensor, rows: ContextRows) -> None:
        """keys, values: [model's layers, entries, rows, kv_heads, head_dim]."""
        ring = self._block + places(rows, self.capacity)
        where = (slice(None), rows.lanes[:, None], ring)
        self.keys[where] = keys.index_select(0, self.index)
        self.values[where] = values.index_select(0, self.index)

    def read(
        self, layer: int, lanes: Tensor, keys: Tensor, values: Tensor, num_places: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the model's `layer`: the given ones of a block, [entries, rows,
        kv_heads, head_dim], then those of the first `num_places` places.
        """
        index, num_rows = self.layers.index(layer), keys.shape[1]
        begin = self._block - num_rows
        block = torch.arange(begin, self._block, device=lanes.device)
        both = []
        for held, given in ((self.keys[index], keys), (self.values[index], values)):
            held[lanes[:, None], block] = given
            both.append(held[lanes, begin : self._block + num_places])
        return both[0], both[1]

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the ring alone, views [layers, lanes + 1, capacity, kv_heads,
        head_dim].
        """
        begin, end = self._block, self._block + self.capacity
        return self.keys[:, :, begin:end], self.values[:, :, begin:end]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class DraftContext:
    """All rings of a drafter, and where the context of its lanes begins.

    `valid_from` int64 [lanes + 1]: positions below it were never written; the last is of lane -1.
    """

    def __init__(
        self,
        spec: DraftSpec,
        *,
        num_lanes: int,
        max_ctx_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """A ring for each size that layers need: full layers keep the context, sliding ones their
        window.
        """
        layers_of: dict[int, list[int]] = {}
        for layer in range(spec.num_layers):
            layers_of.setdefault(spec.capacity(layer, max_ctx_tokens), []).append(layer)
        self.rings = [
            ContextRing(
                spec, layers, num_lanes=num_lanes, capacity=size, dtype=dtype, device=device
            )
            for size, layers in layers_of.items()
        ]
        self.valid_from = torch.zeros(num_lanes + 1, dtype=torch.int64, device=device)

    def ring_of(self, layer: int) -> ContextRing:
        """The ring with the keys and values of the model's `layer`."""
        return next(ring for ring in self.rings if layer in ring.layers)

    def close(self) -> None:
        """Free the rings."""
        self.rings.clear()

    @property
    def num_bytes(self) -> int:
        return sum(ring.num_bytes for ring in self.rings)
