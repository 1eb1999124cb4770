"""Rows of a lane's first tokens, block by block, from pages and from host memory: how blocks are
composed, and how a CPU or a GPU gives each in one piece.

Does not know mixers: the caller names the tensors. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from luceasync.cyext.flatten import fill
from luceasync.host_cache.copies import HostRows
from luceasync.host_cache.copy_stream import Pair, StreamPoint, copy_beside, wait_for
from luceasync.kv.cache import LaneCache, TensorKey
from luceasync.kv.pages import CHUNK_TOKENS, num_chunks

CPU_BLOCK_TOKENS = 1024
GPU_BLOCK_TOKENS = 16384  # the longer the blocks, the less merging them costs
# A bus transfers this much of a layer of large models while the host issues 3 copies.
SHORT_TOKENS = 1024
NUM_PLACES = 2  # one is read while the next one is written

Names = Sequence[str]  # of tensors of rows


class HostRowSource(Protocol):
    """The rows of a lane that host memory has."""

    def rows(self, begin: int, end: int) -> Sequence[HostRows]:
        """Where the rows of tokens `[begin, end)`, which have no page, lie, in order."""
        ...

    def held_until(self, begin: int, end: int) -> int:
        """The end of the part of `[begin, end)` whose rows, with or without pages, can be read
        there, too; `begin`: none can."""
        ...


@dataclass(frozen=True, slots=True)
class BlockSection:
    """Rows of a block from its row `at` on: at `places` of the lane, or in host memory."""

    at: int
    num_rows: int
    places: slice | Tensor | None
    host: HostRows | None


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Tokens `[begin, end)` of a lane, and the sections that hold them, in order."""

    lane: int
    begin: int
    end: int
    sections: tuple[BlockSection, ...]

    def chunks_in_pages(self) -> Iterator[int]:
        """The chunks of which it reads rows from pages."""
        for section in self.sections:
            if section.host is None:
                first = self.begin + section.at
                yield from range(first // CHUNK_TOKENS, num_chunks(first + section.num_rows))


class Staging(Protocol):
    """Provides blocks in order, each in one piece, on the device."""

    @property
    def block_tokens(self) -> int:
        """Blocks begin at multiples of it; all but the last are that long."""
        ...

    @property
    def short_tokens(self) -> int:
        """Runs of at most this many tokens are read from host memory, if it has them, even if they
        have pages: one piece together with its absent neighbours costs less than three."""
        ...

    @property
    def is_in_place(self) -> bool:
        """Whether rows are read in place, so that reading them again causes no transfer."""
        ...

    def tokens_that_fit(self, row_bytes: int) -> int:
        """How many tokens, in whole chunks, fit into a block if a row takes `row_bytes`."""
        ...

    def rows(
        self, blocks: Sequence[RowBlock], layer: int, names: Names
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Where each block begins, and its rows [tokens, ...] of the model's layer, by name. A
        block is valid until the next one is taken; on a GPU, for work that is queued by then on the
        current stream.
        """
        ...

    def release(self) -> None:
        """Release the host memory that has been read."""
        ...

    def close(self) -> None:
        """Wait for all copies. Idempotent."""
        ...


def blocks_of(
    cache: LaneCache,
    lane: int,
    num_tokens: int,
    block_tokens: int,
    short_tokens: int,
    in_host: HostRowSource,
) -> list[RowBlock]:
    """The lane's first `num_tokens` tokens as blocks, wherever they are; see Staging."""
    blocks = []
    for begin in range(0, num_tokens, block_tokens):
        end = min(begin + block_tokens, num_tokens)
        sections: list[BlockSection] = []
        spans = cache.spans(lane, begin, end)
        for first, last, is_in_pages in _read_from(spans, short_tokens, in_host):
            if is_in_pages:
                row_index = cache.row_index(lane, first)
                places = cache.places(lane, row_index, row_index + last - first)
                sections.append(BlockSection(first - begin, last - first, places, None))
            else:
                sections += [
                    BlockSection(rows.begin - begin, rows.num_rows, None, rows)
                    for rows in in_host.rows(first, last)
                ]
        assert sum(section.num_rows for section in sections) == end - begin, f"{begin}: {sections}"
        blocks.append(RowBlock(lane, begin, end, tuple(sections)))
    return blocks


def _read_from(
    spans: Sequence[tuple[int, int, bool]], short_tokens: int, in_host: HostRowSource
) -> list[tuple[int, int, bool]]:
    """The pieces (begin, end, whether from pages) in which `spans` (begin, end, whether they have
    pages) are best read. A short span that host memory has too joins its absent neighbour:

        spans   | absent | pages, short | absent |
        pieces  |      from host memory          |
    """
    found: list[tuple[int, int, bool]] = []
    for begin, end, is_here in spans:
        middle = end
        if is_here:
            middle = in_host.held_until(begin, end) if end - begin <= short_tokens else begin
        if begin < middle:
            if found and not found[-1][2]:
                begin = found.pop()[0]
            found.append((begin, middle, False))
        if middle < end:
            found.append((middle, end, True))
    return found


class DirectStaging:
    """Staging on the CPU. Contiguous rows are read in place, in nodes too."""

    is_in_place = True

    def __init__(self, cache: LaneCache, block_tokens: int = CPU_BLOCK_TOKENS) -> None:
        self._cache = cache
        self.block_tokens = self.short_tokens = block_tokens  # both are host memory
        self._rooms: dict[tuple[object, ...], Tensor] = {}

    def rows(
        self, blocks: Sequence[RowBlock], layer: int, names: Names
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        for block in blocks:
            yield block.begin, tuple(self._tensor(block, layer, name) for name in names)

    def tokens_that_fit(self, row_bytes: int) -> int:
        return self.block_tokens

    def release(self) -> None:
        """No-op: nothing is held."""

    def close(self) -> None:
        """No-op: nothing is in progress."""
        self._rooms.clear()

    def _tensor(self, block: RowBlock, layer: int, name: str) -> Tensor:
        stack = self._cache.rows_of(name, layer)[block.lane]
        for section in block.sections:
            if section.host is not None and section.host.arrival is not None:
                section.host.arrival.wait()
        parts = [section_rows(section, stack, (name, layer)) for section in block.sections]
        if len(parts) == 1:
            return parts[0]
        room = self._room(name, stack)
        row_bytes = stack[0].nbytes
        offsets = [section.at * row_bytes for section in block.sections]
        sources = [part.reshape(-1).view(torch.uint8).numpy() for part in parts]
        fill(room.view(torch.uint8).numpy().reshape(-1), offsets, sources)
        return room[: block.end - block.begin]

    def _room(self, name: str, stack: Tensor) -> Tensor:
        """The buffer of a block's tensor, which kinds with equal rows share."""
        shape = (self.block_tokens, *stack.shape[1:])
        key = (name, shape, stack.dtype)
        if key not in self._rooms:
            self._rooms[key] = stack.new_empty(shape)
        return self._rooms[key]


def section_rows(section: BlockSection, stack: Tensor, key: tuple[str, int]) -> Tensor:
    """The section's rows [rows, ...], from the lane's `stack` [places, ...] or host memory."""
    if section.host is None:
        return stack[section.places]
    first = section.host.first
    return section.host.tensors[key][first : first + section.num_rows]


class _Place:
    """Room for a block of one layer; `is_free`: recorded after its last reader."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.is_free = torch.cuda.Event()
        self.is_here = torch.cuda.Event()


class StreamStaging:
    """Staging on a GPU. Absent rows are copied on a separate stream, concurrent with the
    computation over earlier blocks; owns the places for blocks, and when each may be written."""

    is_in_place = False

    def __init__(self, cache: LaneCache, block_tokens: int = GPU_BLOCK_TOKENS) -> None:
        self.block_tokens, self.short_tokens = block_tokens, SHORT_TOKENS
        self._cache = cache
        self._device = cache.tables.device
        self._stream = torch.cuda.Stream(self._device)
        self._place_bytes = staging_bytes(_layer_row_bytes(cache), block_tokens) // NUM_PLACES
        places = [_Place(self._place_bytes, self._device) for _ in range(NUM_PLACES)]
        self._places = cycle(places)
        # Host memory that is being read.
        self._held: list[tuple[StreamPoint, Sequence[RowBlock]]] = []

    def rows(
        self, blocks: Sequence[RowBlock], layer: int, names: Names
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        for block in blocks:
            place = next(self._places)
            stacks = [self._cache.rows_of(name, layer)[block.lane] for name in names]
            tensors = _tensors(place, stacks, block.end - block.begin)
            keys = [(name, layer) for name in names]
            self._bring(place, block, [*zip(keys, stacks, tensors, strict=True)])
            yield block.begin, tensors
            place.is_free.record(self._computing)
        self._held.append((StreamPoint(self._stream), blocks))

    def tokens_that_fit(self, row_bytes: int) -> int:
        return self._place_bytes // row_bytes // CHUNK_TOKENS * CHUNK_TOKENS

    def release(self) -> None:
        self._held = [(end, of) for end, of in self._held if not end.query()]

    def close(self) -> None:
        wait_for(self._stream.query, "blocks of rows")
        self._held.clear()

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _bring(
        self, place: _Place, block: RowBlock, parts: Sequence[tuple[TensorKey, Tensor, Tensor]]
    ) -> None:
        """Copy the block to its place; `parts`: a tensor's name, the lane's rows, and the target of
        the block's.
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
    """Bytes on the device if the largest layer takes `layer_row_bytes` per token."""
    return NUM_PLACES * block_tokens * layer_row_bytes


def _layer_row_bytes(cache: LaneCache) -> int:
    """Bytes of a token's rows in the largest layer."""
    return max(
        sum(stack[0, 0, 0].nbytes for stack in stacks[: len(kind.rows)])
        for kind, stacks in cache.stacked.items()
    )


def _tensors(place: _Place, stacks: Sequence[Tensor], num_rows: int) -> tuple[Tensor, ...]:
    """A block's tensors [rows, ...] in its place, like those of `stacks` [places, ...]."""
    sizes = [num_rows * stack[0].nbytes for stack in stacks]
    parts = place.bytes[: sum(sizes)].split(sizes)
    return tuple(
        part.view(stack.dtype).view(num_rows, *stack.shape[1:])
        for part, stack in zip(parts, stacks, strict=True)
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
