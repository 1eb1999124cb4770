"""Copies between a GPU's lanes and host memory, beside its computation.

Owns the order of these copies and of what else happens to a lane, and keeps memory alive while they
are under way. Knows no node. Engine thread only.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.host_cache.copies import PageRows, SaveTicket, pairs_of, rows_in, shapes_in
from luceasync.host_cache.copy_stream import (
    CopyJob,
    CopyStream,
    CopyWaiter,
    Pair,
    StreamDependency,
    StreamPoint,
    StreamTicket,
    Ticket,
    copy_beside,
    wait_for,
)
from luceasync.kv.cache import Block, LaneCache, TensorKey

# Copies between a GPU's pages and host memory on a stream of their own, one launch a batch.
# Owns in which words a kernel is told of rows. Knows no order of passes: it is told what comes
# first.


# Copies rows of a lane of the cache, in one direction, on the current stream.
Copy = Callable[[LaneCache, int, Sequence[PageRows]], None]


@dataclass(frozen=True, slots=True)
class PageCopies:
    """What copies rows: `gather` into pages, `scatter` out of them. `rehearse` compiles both."""

    gather: Copy
    scatter: Copy
    rehearse: Callable[[LaneCache], None] = lambda cache: None


def torch_page_copies() -> PageCopies:
    """A copy by the device for each run of rows: what any GPU does."""

    def gather(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        copy_beside(pairs_of(cache.row_bytes(lane), rows))

    def scatter(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        copy_beside((host, here) for here, host in pairs_of(cache.row_bytes(lane), rows))

    return PageCopies(gather, scatter)


def kernel_page_copies(
    device: torch.device, is_in_place: Callable[[Tensor], bool] = Tensor.is_pinned
) -> PageCopies:
    """One launch for all rows in memory that the device reads `is_in_place`; the others, as where
    the system registers none, one by one. Where Numba can compile for the device.
    """
    from luceasync.cuda.pager import PagerKernel

    kernel = PagerKernel(device)
    beside = torch_page_copies()

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

    return PageCopies(gather, scatter, rehearse)


class PageStream:
    """One direction. Engine thread only."""

    def __init__(self, cache: LaneCache, copy: Copy) -> None:
        self._cache = cache
        self._copy = copy
        self._stream = torch.cuda.Stream(cache.tables.device)

    def copy(
        self, lane: int, rows: Sequence[PageRows], after: Sequence[StreamDependency]
    ) -> StreamPoint:
        """Copy rows once `after` is over; the caller keeps them until they have arrived."""
        for before in after:
            before.precede(self._stream)
        with torch.cuda.stream(self._stream):
            self._copy(self._cache, lane, rows)
        return StreamPoint(self._stream)

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


SCATTERED_TOKENS = 512  # of a run of places: a layer of large models has half a megabyte of keys
SMALL_BYTES = 2 << 20  # what a device copies in the time in which it runs a few kernels


class _StagedState:
    """A recurrent state on its way out: it changes in the lane with the next step."""

    def __init__(self, cache: LaneCache) -> None:
        stacks = [stack[:, 0] for stack in cache.state_stacks]
        num_bytes = [stack.numel() * stack.element_size() for stack in stacks]
        self.bytes = torch.empty(sum(num_bytes), dtype=torch.uint8, device=cache.tables.device)
        parts = zip(self.bytes.split(num_bytes), stacks, strict=True)
        self.stacks = [part.view(stack.dtype).view(stack.shape) for part, stack in parts]
        self.taken: CopyJob | None = None


class StreamCopies:
    """Copies by a GPU beside its computation: one stream takes out, another one puts in."""

    def __init__(self, cache: LaneCache, num_staged: int, paging: PageCopies) -> None:
        """`paging` copies pages: see luceasync.host_cache.gpu_copies."""
        self._cache = cache
        self._device = cache.tables.device
        # Every token goes to the host by a copy; what a pass is given comes with its commands.
        self._out = CopyStream(self._device, "save", num_batches=1)
        self._in = CopyStream(self._device, "restore", num_batches=2)
        self._paging = paging
        self._pages_in = PageStream(cache, paging.gather)
        self._pages_out = PageStream(cache, paging.scatter)
        has_state = any(stack.numel() for stack in cache.state_stacks)
        self._staged = deque(_StagedState(cache) for _ in range(num_staged if has_state else 0))
        # By lane: saves that read it; its restore; what reads or writes places of what it was
        # before, which its next pass comes after; what is paged in.
        self._saves: dict[int, list[CopyJob | StreamPoint]] = defaultdict(list)
        self._restores: dict[int, CopyJob] = {}
        self._before_use: dict[int, list[CopyJob | StreamPoint]] = defaultdict(list)
        self._paged_in: dict[int, list[StreamPoint]] = defaultdict(list)
        self._held: list[tuple[CopyJob | StreamPoint, object]] = []
        # Apart, so that a restore that has arrived is not told after a save that goes on.
        self._saved, self._restored = CopyWaiter("saved"), CopyWaiter("restored")

    @torch.inference_mode()
    def save(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
        rows_at: Sequence[int] | None = None,
    ) -> SaveTicket:
        """See LaneCopies. The state is first copied on the device, in the order of the passes."""
        with torch.cuda.device(self._device):
            copies = self._save(lane, runs, row_region, state_region, end, rows_at)
        return StreamTicket(copies, self._saved)

    def _save(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
        rows_at: Sequence[int] | None,
    ) -> CopyJob | StreamPoint:
        staged = None if state_region is None else self._stage(end)
        regions = [region for region in (row_region, state_region) if region is not None]
        if rows_at is None and sum(region.nbytes for region in regions) <= SMALL_BYTES:
            return self._save_now(lane, runs, row_region, state_region, staged)
        begun = StreamPoint(self._computing)
        if row_region is not None and (rows_at is not None or _are_scattered(runs)):
            at = rows_at or [0, *itertools.accumulate(map(len, runs))][:-1]
            pages = rows_in(row_region, shapes_in(self._cache, row_region), runs, at)
            taken = self._pages_out.copy(lane, pages, [begun])
            self._hold(taken, row_region)
            self._saves[lane] = [*_on_their_way(self._saves[lane]), taken]
            if staged is None or state_region is None:
                return taken
            row_region, begun = None, taken  # the state arrives behind them
        if staged is not None and state_region is not None:
            state = torch.frombuffer(state_region, dtype=torch.uint8)
            staged.taken = self._out.put([begun], [(state, staged.bytes)])
        rows = self._cache.row_blocks(lane, runs)
        delivery = self._out.put([begun], [] if row_region is None else _into(row_region, rows))
        self._saves[lane] = [*_on_their_way(self._saves[lane]), delivery]
        self._hold(delivery, [row_region, state_region])
        return delivery

    def restore(
        self,
        lane: int,
        pairs: Iterable[Pair],
        memory: object,
        after: Sequence[SaveTicket],
    ) -> Ticket:
        """See LaneCopies."""
        saves = self._before_use[lane]
        delivery = self._in.put([StreamPoint(self._computing), *saves, *after], pairs)
        self._restores[lane] = delivery
        self._hold(delivery, memory)
        return StreamTicket(delivery, self._restored)

    def page_in(self, lane: int, rows: Sequence[PageRows]) -> Ticket:
        """See LaneCopies."""
        with torch.cuda.device(self._device):
            saves = _on_their_way([*self._before_use[lane], *self._saves[lane]])
            arrivals = [each.host.arrival for each in rows if each.host.arrival is not None]
            copies = self._pages_in.copy(
                lane, rows, [StreamPoint(self._computing), *saves, *arrivals]
            )
        self._paged_in[lane].append(copies)
        self._hold(copies, list(rows))
        return StreamTicket(copies, self._restored)

    def listed(self, lane: int) -> None:
        """See LaneCopies."""
        for copies in self._paged_in.pop(lane, []):
            copies.precede(self._computing)

    def freed(self, lane: int) -> None:
        """See LaneCopies."""
        saves = self._saves[lane] = _on_their_way(self._saves[lane])
        for copies in saves:
            copies.hurry_before(self._computing)

    def use(self, lanes: Sequence[int]) -> None:
        """See LaneCopies. Copies that are not all queued yet are queued now."""
        self._release()
        for lane in lanes:
            for copies in self._before_use.pop(lane, []):
                copies.hurry_before(self._computing)
            restore = self._restores.get(lane)
            if restore is not None:
                restore.hurry_before(self._computing)
                if restore.query():
                    del self._restores[lane]

    def rewrite(self, lane: int) -> None:
        """See LaneCopies. A restore that nobody wants any more is left where it is."""
        restore = self._restores.pop(lane, None)
        if restore is not None and self._in.cancel(restore):
            restore.precede(self._computing)
        under_way = [*self._before_use[lane], *self._saves.pop(lane, [])]
        self._before_use[lane] = _on_their_way([*under_way, *self._paged_in.pop(lane, [])])

    def rehearse(self) -> None:
        """See LaneCopies."""
        with torch.cuda.device(self._device):
            self._paging.rehearse(self._cache)

    def close(self) -> None:
        """See LaneCopies."""
        self._out.close()
        self._in.close()
        self._pages_out.close()
        self._pages_in.close()
        self._saved.close()
        self._restored.close()
        self._held.clear()
        self._staged.clear()

    def _save_now(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        staged: _StagedState | None,
    ) -> StreamPoint:
        """Copies between the passes: handing them to a thread would take longer."""
        pairs = [] if row_region is None else self._gathered(lane, runs, row_region)
        if staged is not None and state_region is not None:
            pairs.append((torch.frombuffer(state_region, dtype=torch.uint8), staged.bytes))
            staged.taken = None
        copy_beside(pairs)
        arrival = StreamPoint(self._computing)
        self._hold(arrival, [row_region, state_region])
        return arrival

    def _gathered(self, lane: int, runs: Sequence[range], region: memoryview) -> list[Pair]:
        """The rows of all layers in one piece: of little, a copy takes less than asking for it."""
        sources = [
            torch.cat([stack[:, lane, run.start : run.stop] for run in runs], 1)
            for stack in self._cache.row_stacks
        ]
        sources = [source.view(-1).view(torch.uint8) for source in sources]
        targets = torch.frombuffer(region, dtype=torch.uint8).split([s.numel() for s in sources])
        return [*zip(targets, sources, strict=True)]

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _stage(self, end: int) -> _StagedState:
        """Copy a state, `end` among those of lanes, to the place that is free first; the device
        waits for it.
        """
        assert self._staged, "a node with a state, of lanes that have none"
        staged = self._staged[0]
        self._staged.rotate(-1)
        if staged.taken is not None:
            staged.taken.hurry_before(self._computing)
        for place, stack in zip(staged.stacks, self._cache.state_stacks, strict=True):
            place.copy_(stack[:, end])
        return staged

    def _hold(self, copies: CopyJob | StreamPoint, memory: object) -> None:
        """Keep host memory until it has been read or written."""
        self._release()
        self._held.append((copies, memory))

    def _release(self) -> None:
        """Also without a further copy: where memory is full there will be none before."""
        self._held = [(copies, held) for copies, held in self._held if not copies.query()]


def _on_their_way(copies: Sequence[CopyJob | StreamPoint]) -> list[CopyJob | StreamPoint]:
    return [each for each in copies if not each.query()]


def _are_scattered(runs: Sequence[range]) -> bool:
    """Whether runs are so short that asking for a copy of each takes longer than it does."""
    return len(runs) > 1 and sum(map(len, runs)) < SCATTERED_TOKENS * len(runs)


def _into(region: memoryview, blocks: Iterable[Block]) -> Iterator[Pair]:
    target = torch.frombuffer(region, dtype=torch.uint8)
    for source, begin in blocks:
        yield target[begin : begin + source.numel()], source
