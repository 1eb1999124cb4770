"""Copies between a GPU's lanes and host memory, beside its computation.

Owns the order of these copies and of what else happens to a lane, and keeps memory alive while they
are under way. Knows no node. Engine thread only.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from luceasync.hoststore.arrivals import Arrivals
from luceasync.hoststore.copy_stream import CopyStream, Delivery, Pair, copy_beside
from luceasync.hoststore.host_rows import Arrival, PageRows, rows_in
from luceasync.hoststore.lane_copies import shapes_in
from luceasync.hoststore.page_stream import PageStream, Paging
from luceasync.hoststore.stream_tickets import Now, Queued
from luceasync.hoststore.tickets import Ticket
from luceasync.kv.cache import Block, LaneCache

SCATTERED_TOKENS = 512  # of a run of places: a layer of large models has half a megabyte of keys
SMALL_BYTES = 2 << 20  # what a device copies in the time in which it runs a few kernels


class _Staged:
    """A recurrent state on its way out: it changes in the lane with the next step."""

    def __init__(self, cache: LaneCache) -> None:
        stacks = [stack[:, 0] for stack in cache.state_stacks]
        num_bytes = [stack.numel() * stack.element_size() for stack in stacks]
        self.bytes = torch.empty(sum(num_bytes), dtype=torch.uint8, device=cache.tables.device)
        parts = zip(self.bytes.split(num_bytes), stacks, strict=True)
        self.stacks = [part.view(stack.dtype).view(stack.shape) for part, stack in parts]
        self.taken: Delivery | None = None


class StreamCopies:
    """Copies by a GPU beside its computation: one stream takes out, another one puts in."""

    def __init__(self, cache: LaneCache, num_staged: int, paging: Paging) -> None:
        """`paging` copies pages: see luceasync.hoststore.page_stream."""
        self._cache = cache
        self._device = cache.tables.device
        # Every token goes to the host by a copy; what a pass is given comes with its commands.
        self._out = CopyStream(self._device, "save", num_batches=1)
        self._in = CopyStream(self._device, "restore", num_batches=2)
        self._paging = paging
        self._pages_in = PageStream(cache, paging.gather)
        self._pages_out = PageStream(cache, paging.scatter)
        has_state = any(stack.numel() for stack in cache.state_stacks)
        self._staged = deque(_Staged(cache) for _ in range(num_staged if has_state else 0))
        # By lane: saves that read it; its restore; what reads or writes places of what it was
        # before, which its next pass comes after; what is paged in.
        self._saves: dict[int, list[Delivery | Now]] = defaultdict(list)
        self._restores: dict[int, Delivery] = {}
        self._before_use: dict[int, list[Delivery | Now]] = defaultdict(list)
        self._paged_in: dict[int, list[Now]] = defaultdict(list)
        self._held: list[tuple[Delivery | Now, object]] = []
        # Apart, so that a restore that has arrived is not told after a save that goes on.
        self._saved, self._restored = Arrivals("saved"), Arrivals("restored")

    @torch.inference_mode()
    def take_out(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
        rows_at: Sequence[int] | None = None,
    ) -> Arrival:
        """See LaneCopies. The state is first copied on the device, in the order of the passes."""
        with torch.cuda.device(self._device):
            copies = self._take_out(lane, runs, row_region, state_region, end, rows_at)
        return Queued(copies, self._saved)

    def _take_out(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
        rows_at: Sequence[int] | None,
    ) -> Delivery | Now:
        staged = None if state_region is None else self._stage(end)
        regions = [region for region in (row_region, state_region) if region is not None]
        if rows_at is None and sum(region.nbytes for region in regions) <= SMALL_BYTES:
            return self._save_now(lane, runs, row_region, state_region, staged)
        begun = Now(self._computing)
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

    def put_in(
        self,
        lane: int,
        pairs: Iterable[Pair],
        memory: object,
        after: Sequence[Arrival],
    ) -> Ticket:
        """See LaneCopies."""
        saves = self._before_use[lane]
        delivery = self._in.put([Now(self._computing), *saves, *after], pairs)
        self._restores[lane] = delivery
        self._hold(delivery, memory)
        return Queued(delivery, self._restored)

    def page_in(self, lane: int, rows: Sequence[PageRows]) -> Ticket:
        """See LaneCopies."""
        with torch.cuda.device(self._device):
            saves = _on_their_way([*self._before_use[lane], *self._saves[lane]])
            arrivals = [each.host.arrival for each in rows if each.host.arrival is not None]
            copies = self._pages_in.copy(lane, rows, [Now(self._computing), *saves, *arrivals])
        self._paged_in[lane].append(copies)
        self._hold(copies, list(rows))
        return Queued(copies, self._restored)

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
        self._let_go()
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
        staged: _Staged | None,
    ) -> Now:
        """Copies between the passes: handing them to a thread would take longer."""
        pairs = [] if row_region is None else self._gathered(lane, runs, row_region)
        if staged is not None and state_region is not None:
            pairs.append((torch.frombuffer(state_region, dtype=torch.uint8), staged.bytes))
            staged.taken = None
        copy_beside(pairs)
        arrival = Now(self._computing)
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

    def _stage(self, end: int) -> _Staged:
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

    def _hold(self, copies: Delivery | Now, memory: object) -> None:
        """Keep host memory until it has been read or written."""
        self._let_go()
        self._held.append((copies, memory))

    def _let_go(self) -> None:
        """Also without a further copy: where memory is full there will be none before."""
        self._held = [(copies, held) for copies, held in self._held if not copies.query()]


def _on_their_way(copies: Sequence[Delivery | Now]) -> list[Delivery | Now]:
    return [each for each in copies if not each.query()]


def _are_scattered(runs: Sequence[range]) -> bool:
    """Whether runs are so short that asking for a copy of each takes longer than it does."""
    return len(runs) > 1 and sum(map(len, runs)) < SCATTERED_TOKENS * len(runs)


def _into(region: memoryview, blocks: Iterable[Block]) -> Iterator[Pair]:
    target = torch.frombuffer(region, dtype=torch.uint8)
    for source, begin in blocks:
        yield target[begin : begin + source.numel()], source
