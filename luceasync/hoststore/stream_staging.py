"""Blocks of a lane's rows on a GPU: absent ones come by a stream of copies of their own, while
what came before is computed with.

Owns a few places for blocks, and who may write them when. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from luceasync.hoststore.copy_stream import Pair, copy_beside, wait_for
from luceasync.hoststore.staging import Block, Names, section_rows
from luceasync.hoststore.stream_tickets import Now
from luceasync.kv.cache import LaneCache, TensorKey
from luceasync.kv.pages import CHUNK_TOKENS

GPU_BLOCK_TOKENS = 16384  # merging blocks costs the less the longer they are
# Of a layer of large models a bus carries so many while a host asks for three pieces.
SHORT_TOKENS = 1024
NUM_PLACES = 2  # one is read while the next one is written


class _Place:
    """Room for a block of one layer; `is_free` once what reads it is done."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.is_free = torch.cuda.Event()
        self.is_here = torch.cuda.Event()


class StreamStaging:
    """See Staging."""

    is_in_place = False

    def __init__(self, cache: LaneCache, block_tokens: int = GPU_BLOCK_TOKENS) -> None:
        self.block_tokens, self.short_tokens = block_tokens, SHORT_TOKENS
        self._cache = cache
        self._device = cache.tables.device
        self._stream = torch.cuda.Stream(self._device)
        self._place_bytes = staging_bytes(_layer_row_bytes(cache), block_tokens) // NUM_PLACES
        places = [_Place(self._place_bytes, self._device) for _ in range(NUM_PLACES)]
        self._places = cycle(places)
        self._held: list[tuple[Now, Sequence[Block]]] = []  # host memory that is read

    def rows(
        self, blocks: Sequence[Block], layer: int, names: Names
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """See Staging."""
        for block in blocks:
            place = next(self._places)
            stacks = [self._cache.rows_of(name, layer)[block.lane] for name in names]
            tensors = _tensors(place, stacks, block.end - block.begin)
            keys = [(name, layer) for name in names]
            self._bring(place, block, [*zip(keys, stacks, tensors, strict=True)])
            yield block.begin, tensors
            place.is_free.record(self._computing)
        self._held.append((Now(self._stream), blocks))

    def tokens_that_fit(self, row_bytes: int) -> int:
        """See Staging."""
        return self._place_bytes // row_bytes // CHUNK_TOKENS * CHUNK_TOKENS

    def let_go(self) -> None:
        """See Staging."""
        self._held = [(end, of) for end, of in self._held if not end.query()]

    def close(self) -> None:
        """See Staging."""
        wait_for(self._stream.query, "blocks of rows")
        self._held.clear()

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _bring(
        self, place: _Place, block: Block, parts: Sequence[tuple[TensorKey, Tensor, Tensor]]
    ) -> None:
        """Copy the block to its place: `parts` are a tensor's name, the lane's rows, and where the
        block's go.
        """
        self._computing.wait_event(place.is_free)  # another stream may have read it last
        self._stream.wait_event(place.is_free)
        pairs: list[Pair] = []
        for section in block.sections:
            for key, stack, target in parts:
                into = target[section.at : section.at + section.num_rows]
                if section.host is not None:
                    pairs.append((_bytes_of(into), _bytes_of(section_rows(section, stack, key))))
                elif isinstance(section.places, Tensor):
                    torch.index_select(stack, 0, section.places, out=into)
                else:
                    into.copy_(stack[section.places])
        if pairs:
            for section in block.sections:
                if section.host is not None and section.host.arrival is not None:
                    section.host.arrival.precede(self._stream)
            with torch.cuda.stream(self._stream):
                copy_beside(pairs)
            place.is_here.record(self._stream)
            self._computing.wait_event(place.is_here)


def staging_bytes(layer_row_bytes: int, block_tokens: int = GPU_BLOCK_TOKENS) -> int:
    """Bytes on the device, where a token has so many in the layer that keeps the most."""
    return NUM_PLACES * block_tokens * layer_row_bytes


def _layer_row_bytes(cache: LaneCache) -> int:
    """Bytes of a token's rows in the layer that keeps the most."""
    return max(
        sum(stack[0, 0, 0].nbytes for stack in stacks[: len(kind.rows)])
        for kind, stacks in cache.stacked.items()
    )


def _tensors(place: _Place, stacks: Sequence[Tensor], num_rows: int) -> tuple[Tensor, ...]:
    """A block's tensors, [rows, ...] as those of `stacks` [places, ...], in its place."""
    sizes = [num_rows * stack[0].nbytes for stack in stacks]
    parts = place.bytes[: sum(sizes)].split(sizes)
    return tuple(
        part.view(stack.dtype).view(num_rows, *stack.shape[1:])
        for part, stack in zip(parts, stacks, strict=True)
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
