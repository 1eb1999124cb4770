"""Copies between a GPU's lanes and host memory, concurrent with its computation.

Owns the order between these copies and other work on a lane, and keeps memory alive while they are
in progress. Does not know nodes. Engine thread only.
"""

from __future__ import annotations

import functools
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

SCATTERED_TOKENS = 512  # of a run of places: large models have half a megabyte of keys per layer
SMALL_BYTES = 2 << 20  # what a device copies in the time that a few kernels take

# Copies rows of a lane of the cache, in one direction, on the current stream.
Copy = Callable[[LaneCache, int, Sequence[PageRows]], None]


@dataclass(frozen=True, slots=True)
class PageCopies:
    """How rows are copied: `gather` into pages, `scatter` out of them. `rehearse` compiles both."""

    gather: Copy
    scatter: Copy
    rehearse: Callable[[LaneCache], None] = lambda cache: None


def made_on_use(make: Callable[[], PageCopies]) -> PageCopies:
    """The page copies of `make`, which is called on first use: importing Numba and compiling its
    kernels takes seconds, and lanes that have all their pages in order need none.
    """
    made = functools.cache(make)
    return PageCopies(
        gather=lambda cache, lane, rows: made().gather(cache, lane, rows),
        scatter=lambda cache, lane, rows: made().scatter(cache, lane, rows),
        rehearse=lambda cache: made().rehearse(cache),
    )


def torch_page_copies() -> PageCopies:
    """One copy for each run of rows, on any GPU."""

    def gather(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        copy_beside(pairs_of(cache.row_bytes(lane), rows))

    def scatter(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        copy_beside((host, here) for here, host in pairs_of(cache.row_bytes(lane), rows))

    return PageCopies(gather, scatter)


def kernel_page_copies(
    device: torch.device, is_in_place: Callable[[Tensor], bool] = Tensor.is_pinned
) -> PageCopies:
    """One launch for all rows in memory that the device can access directly, as `is_in_place`
    tells; other rows, for example on systems that register no memory, are copied one by one. Numba
    must be able to compile for the device."""
    from luceasync.cuda.pager import PagerKernel

    kernel = PagerKernel(device)
    beside = torch_page_copies()

    def gather(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        in_place, others = _parted(rows, is_in_place)
        kernel.gather(*_kernel_arguments(cache, lane, in_place))
        beside.gather(cache, lane, others)

    def scatter(cache: LaneCache, lane: int, rows: Sequence[PageRows]) -> None:
        in_place, others = _parted(rows, is_in_place)
        kernel.scatter(*_kernel_arguments(cache, lane, in_place))
        beside.scatter(cache, lane, others)

    def rehearse(cache: LaneCache) -> None:
        stacks, parts, _, _ = _kernel_arguments(cache, 0, [])
        anywhere = [[stacks[number].data_ptr() for number, _, _ in parts]]
        for run in (kernel.gather, kernel.scatter):
            run(stacks, parts, anywhere, [(0, 0, 0, 0)] if parts else [])  # of no row

    return PageCopies(gather, scatter, rehearse)


class PageStream:
    """One direction of page copies, on a separate stream. Engine thread only."""

    def __init__(self, cache: LaneCache, copy: Copy) -> None:
        self._cache = cache
        self._copy = copy
        self._stream = torch.cuda.Stream(cache.tables.device)

    def copy(
        self, lane: int, rows: Sequence[PageRows], after: Sequence[StreamDependency]
    ) -> StreamPoint:
        """Copy rows once `after` is over; the caller holds them until they have arrived."""
        for before in after:
            before.precede(self._stream)
        with torch.cuda.stream(self._stream):
            self._copy(self._cache, lane, rows)
        return StreamPoint(self._stream)

    def close(self) -> None:
        """Wait for all copies. Idempotent. Raises TimeoutError."""
        wait_for(self._stream.query, "copies of pages")


def _parted(
    rows: Sequence[PageRows], is_in_place: Callable[[Tensor], bool]
) -> tuple[list[PageRows], list[PageRows]]:
    """The rows that a kernel can access in place, and the others."""
    tensors = {id(each.host.tensors): each.host.tensors for each in rows}
    pinned = {key: _all_in_place(of.values(), is_in_place) for key, of in tensors.items()}
    in_place = [each for each in rows if pinned[id(each.host.tensors)]]
    return in_place, [each for each in rows if not pinned[id(each.host.tensors)]]


def _all_in_place(tensors: Iterable[Tensor], is_in_place: Callable[[Tensor], bool]) -> bool:
    """Whether all tensors are; the driver is queried once for each piece of memory."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return all(map(is_in_place, storages.values()))


def _kernel_arguments(
    cache: LaneCache, lane: int, rows: Sequence[PageRows]
) -> tuple[
    list[Tensor],
    list[tuple[int, int, int]],
    list[list[int]],
    list[tuple[int, int, int, int]],
]:
    """The arguments of luceasync.cuda.pager: stacks, parts, addresses, pieces."""
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
    """For each tensor of rows: its stack, the byte where the lane begins, and a row's bytes."""
    keys, stacks = [*cache.row_shapes(0)], cache.row_stacks
    parts = []
    for number, stack in enumerate(stacks):
        of_layer, of_lane, of_row = (size * stack.element_size() for size in stack.stride()[:3])
        parts += [
            (number, layer * of_layer + lane * of_lane, of_row) for layer in range(len(stack))
        ]
    return keys, parts


class _StagedState:
    """A recurrent state on its way to the host, copied aside because the lane's state changes with
    the next step."""

    def __init__(self, cache: LaneCache) -> None:
        stacks = [stack[:, 0] for stack in cache.state_stacks]
        num_bytes = [stack.numel() * stack.element_size() for stack in stacks]
        self.bytes = torch.empty(sum(num_bytes), dtype=torch.uint8, device=cache.tables.device)
        parts = zip(self.bytes.split(num_bytes), stacks, strict=True)
        self.stacks = [part.view(stack.dtype).view(stack.shape) for part, stack in parts]
        self.taken: CopyJob | None = None


class StreamCopies:
    """Copies by a GPU, concurrent with its computation: one stream saves, another one restores."""

    def __init__(self, cache: LaneCache, num_staged: int, paging: PageCopies) -> None:
        """`num_staged`: how many states may be on their way to the host."""
        self._cache = cache
        self._device = cache.tables.device
        # Every token is copied to the host, while the inputs of a pass come with its commands: so
        # saves leave the copy engine free in between, and restores need not.
        self._out = CopyStream(self._device, "save", num_batches=1)
        self._in = CopyStream(self._device, "restore", num_batches=2)
        self._paging = paging
        self._pages_in = PageStream(cache, paging.gather)
        self._pages_out = PageStream(cache, paging.scatter)
        # State that is too large to have a spare is too large to be staged.
        is_staged = cache.has_spare_ends and any(stack.numel() for stack in cache.state_stacks)
        self._staged = deque(_StagedState(cache) for _ in range(num_staged if is_staged else 0))
        # By lane: saves that read it; its restore; copies of its earlier contents, after which its
        # next pass must run; copies that page in.
        self._saves: dict[int, list[CopyJob | StreamPoint]] = defaultdict(list)
        self._restores: dict[int, CopyJob] = {}
        self._before_use: dict[int, list[CopyJob | StreamPoint]] = defaultdict(list)
        self._paged_in: dict[int, list[StreamPoint]] = defaultdict(list)
        # Saves that read a lane's current state, which must not change meanwhile.
        self._state_saves: dict[int, list[CopyJob]] = defaultdict(list)
        self._held: list[tuple[CopyJob | StreamPoint, object]] = []
        # Two threads, so that a finished restore is not reported late because of a longer save.
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
        """The state, if it is staged, is first copied on the device, in stream order with passes;
        otherwise the lane's next pass runs after its copy."""
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
        if state_region is not None and not self._cache.has_spare_ends:
            after: list[StreamDependency] = [StreamPoint(self._computing)]
            if row_region is not None:
                after.append(self._save(lane, runs, row_region, None, end, rows_at))
            return self._save_state(lane, state_region, after)
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
            row_region, begun = None, taken  # the state arrives after them
        if staged is not None and state_region is not None:
            state = torch.frombuffer(state_region, dtype=torch.uint8)
            staged.taken = self._out.put([begun], [(state, staged.bytes)])
        rows = self._cache.row_blocks(lane, runs)
        job = self._out.put([begun], [] if row_region is None else _into(row_region, rows))
        self._saves[lane] = [*_on_their_way(self._saves[lane]), job]
        self._hold(job, [row_region, state_region])
        return job

    def _save_state(
        self, lane: int, region: memoryview, after: Sequence[StreamDependency]
    ) -> CopyJob:
        """Copy the lane's state directly from the lane."""
        sources = [*self._cache.state_bytes(lane).values()]
        sizes = [source.numel() for source in sources]
        targets = torch.frombuffer(region, dtype=torch.uint8).split(sizes)
        job = self._out.put(after, zip(targets, sources, strict=True))
        self._state_saves[lane].append(job)
        self._hold(job, region)
        return job

    def restore(
        self,
        lane: int,
        pairs: Iterable[Pair],
        memory: object,
        after: Sequence[SaveTicket],
    ) -> Ticket:
        saves = [*self._before_use[lane], *self._state_saves.pop(lane, [])]
        job = self._in.put([StreamPoint(self._computing), *saves, *after], pairs)
        self._restores[lane] = job
        self._hold(job, memory)
        return StreamTicket(job, self._restored)

    def page_in(self, lane: int, rows: Sequence[PageRows]) -> Ticket:
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
        for copies in self._paged_in.pop(lane, []):
            copies.precede(self._computing)

    def freed(self, lane: int) -> None:
        saves = self._saves[lane] = _on_their_way(self._saves[lane])
        for copies in saves:
            copies.hurry_before(self._computing)

    def use(self, lanes: Sequence[int]) -> None:
        """Hurry those copies of the lanes that are not all queued yet."""
        self._release()
        for lane in lanes:
            self._hurry_state(lane)
            for copies in self._before_use.pop(lane, []):
                copies.hurry_before(self._computing)
            restore = self._restores.get(lane)
            if restore is not None:
                restore.hurry_before(self._computing)
                if restore.query():
                    del self._restores[lane]

    def rewrite(self, lane: int) -> None:
        """Abandon a restore in progress."""
        self._hurry_state(lane)
        restore = self._restores.pop(lane, None)
        if restore is not None and self._in.cancel(restore):
            restore.precede(self._computing)
        under_way = [*self._before_use[lane], *self._saves.pop(lane, [])]
        self._before_use[lane] = _on_their_way([*under_way, *self._paged_in.pop(lane, [])])

    def _hurry_state(self, lane: int) -> None:
        """The work queued next may change the lane's state: hurry its copies."""
        for copies in self._state_saves.pop(lane, []):
            copies.hurry_before(self._computing)

    def rehearse(self) -> None:
        with torch.cuda.device(self._device):
            self._paging.rehearse(self._cache)

    def close(self) -> None:
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
        """Copy on the stream of the passes: handing a small copy to a thread would take longer."""
        pairs = [] if row_region is None else self._gathered(lane, runs, row_region)
        if staged is not None and state_region is not None:
            pairs.append((torch.frombuffer(state_region, dtype=torch.uint8), staged.bytes))
            staged.taken = None
        copy_beside(pairs)
        arrival = StreamPoint(self._computing)
        self._hold(arrival, [row_region, state_region])
        return arrival

    def _gathered(self, lane: int, runs: Sequence[range], region: memoryview) -> list[Pair]:
        """The rows of all layers in one buffer: copying few bytes takes less time than many
        calls."""
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
        """Copy a state, `end` among the lanes' ends, to the buffer that is free first; the device
        waits for that."""
        assert self._staged, "a node with a state, but lanes have none"
        staged = self._staged[0]
        self._staged.rotate(-1)
        if staged.taken is not None:
            staged.taken.hurry_before(self._computing)
        for place, stack in zip(staged.stacks, self._cache.state_stacks, strict=True):
            place.copy_(stack[:, end])
        return staged

    def _hold(self, copies: CopyJob | StreamPoint, memory: object) -> None:
        """Keep host memory alive until it has been read or written."""
        self._release()
        self._held.append((copies, memory))

    def _release(self) -> None:
        """Release the memory of finished copies: if memory is full, no further copy would do
        this."""
        self._held = [(copies, held) for copies, held in self._held if not copies.query()]


def _on_their_way(copies: Sequence[CopyJob | StreamPoint]) -> list[CopyJob | StreamPoint]:
    return [each for each in copies if not each.query()]


def _are_scattered(runs: Sequence[range]) -> bool:
    """Whether runs are so short that launching one copy for each takes longer than copying them."""
    return len(runs) > 1 and sum(map(len, runs)) < SCATTERED_TOKENS * len(runs)


def _into(region: memoryview, blocks: Iterable[Block]) -> Iterator[Pair]:
    target = torch.frombuffer(region, dtype=torch.uint8)
    for source, begin in blocks:
        yield target[begin : begin + source.numel()], source
