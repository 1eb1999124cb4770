"""Copies between a GPU's pages and host memory on a stream of their own, one launch a batch.

Owns in which words a kernel is told of rows. Knows no order of passes: it is told what comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.hoststore.copy_stream import Before, copy_beside, wait_for
from luceasync.hoststore.host_rows import PageRows, pairs_of
from luceasync.hoststore.stream_tickets import Now
from luceasync.kv.cache import LaneCache, TensorKey

# Copies rows of a lane of the cache, in one direction, on the current stream.
Copy = Callable[[LaneCache, int, Sequence[PageRows]], None]


@dataclass(frozen=True, slots=True)
class Paging:
    """What copies rows: `gather` into pages, `scatter` out of them. `rehearse` compiles both."""

    gather: Copy
    scatter: Copy
    rehearse: Callable[[LaneCache], None] = lambda cache: None


def torch_paging() -> Paging:
    """A copy by the device for each run of rows: what any GPU does."""

    def gather(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        copy_beside(pairs_of(cache.row_bytes(lane), rows))

    def scatter(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        copy_beside((host, here) for here, host in pairs_of(cache.row_bytes(lane), rows))

    return Paging(gather, scatter)


def kernel_paging(
    device: torch.device, is_in_place: Callable[[Tensor], bool] = Tensor.is_pinned
) -> Paging:
    """One launch for all rows in memory that the device reads `is_in_place`; the others, as where
    the system registers none, one by one. Where Numba can compile for the device.
    """
    from luceasync.cuda.pager import PagerKernel

    kernel = PagerKernel(device)
    beside = torch_paging()

    def gather(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        in_place, others = _parted(rows, is_in_place)
        kernel.gather(*_told(cache, lane, in_place))
        beside.gather(cache, lane, others)

    def scatter(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        in_place, others = _parted(rows, is_in_place)
        kernel.scatter(*_told(cache, lane, in_place))
        beside.scatter(cache, lane, others)

    def rehearse(cache: LaneCache) -> None:
        stacks, parts, _, _ = _told(cache, 0, [])
        anywhere = [[stacks[number].data_ptr() for number, _, _ in parts]]
        for run in (kernel.gather, kernel.scatter):
            run(stacks, parts, anywhere, [(0, 0, 0, 0)] if parts else [])  # of no row

    return Paging(gather, scatter, rehearse)


class PageStream:
    """One direction. Engine thread only."""

    def __init__(self, cache: LaneCache, copy: Copy) -> None:
        self._cache = cache
        self._copy = copy
        self._stream = torch.cuda.Stream(cache.tables.device)

    def copy(self, lane: int, rows: Sequence[PageRows], after: Sequence[Before]) -> Now:
        """Copy rows once `after` is over; the caller keeps them until they have arrived."""
        for before in after:
            before.precede(self._stream)
        with torch.cuda.stream(self._stream):
            self._copy(self._cache, lane, rows)
        return Now(self._stream)

    def close(self) -> None:
        """Wait for everything. May be called twice. Raises TimeoutError."""
        wait_for(self._stream.query, "copies of pages")


def _parted(
    rows: Sequence[PageRows], is_in_place: Callable[[Tensor], bool]
) -> tuple[list[PageRows], list[PageRows]]:
    """Rows that a kernel can read and write in place, and the others."""
    tensors = {id(each.host.tensors): each.host.tensors for each in rows}
    pinned = {key: _all_in_place(of.values(), is_in_place) for key, of in tensors.items()}
    in_place = [each for each in rows if pinned[id(each.host.tensors)]]
    return in_place, [each for each in rows if not pinned[id(each.host.tensors)]]


def _all_in_place(tensors: Iterable[Tensor], is_in_place: Callable[[Tensor], bool]) -> bool:
    """Asks a driver once for all that lies in one piece of memory."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return all(map(is_in_place, storages.values()))


def _told(
    cache: LaneCache, lane: int, rows: Sequence[PageRows]
) -> tuple[
    list[Tensor],
    list[tuple[int, int, int]],
    list[list[int]],
    list[tuple[int, int, int, int]],
]:
    """What luceasync.cuda.pager is told: stacks, parts, addresses, pieces."""
    sources: dict[int, int] = {}
    keys, parts = _parts(cache, lane)
    addresses, pieces = [], []
    for each in rows:
        tensors = each.host.tensors
        if id(tensors) not in sources:
            sources[id(tensors)] = len(sources)
            addresses.append([tensors[key].data_ptr() for key in keys])
        place = (sources[id(tensors)], each.host.first, each.place, each.host.num_rows)
        pieces.append(place)
    return cache.row_stacks, parts, addresses, pieces


def _parts(cache: LaneCache, lane: int) -> tuple[list[TensorKey], list[tuple[int, int, int]]]:
    """Of each tensor of rows its stack, the byte in it at which the lane begins, a row's bytes."""
    keys, stacks = [*cache.row_shapes(0)], cache.row_stacks
    parts = []
    for number, stack in enumerate(stacks):
        of_layer, of_lane, of_row = (size * stack.element_size() for size in stack.stride()[:3])
        parts += [
            (number, layer * of_layer + lane * of_lane, of_row) for layer in range(len(stack))
        ]
    return keys, parts
