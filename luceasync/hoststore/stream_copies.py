"""Copies between a GPU's lanes and host memory, beside its computation.

Owns the order of these copies and of what else happens to a lane, and keeps memory alive while they
are under way. Knows no node. Engine thread only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from luceasync.hoststore.arrivals import Arrivals
from luceasync.hoststore.copy_stream import (
    CopyStream,
    Delivery,
    Pair,
    copy_beside,
    sleep_until,
    wait_for,
)
from luceasync.hoststore.lane_copies import Arrival
from luceasync.hoststore.tickets import Call, Ticket
from luceasync.kv.cache import Block, LaneCache

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


class _Now:
    """What a stream has queued so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        wait_for(self._event.query, "copies from a device to host memory")

    def sleep(self) -> None:
        sleep_until(self._event)

    def precede(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class _Queued:
    """An Arrival of copies on a stream; `arrivals` waits for them where somebody wants to hear."""

    def __init__(self, copies: Delivery | _Now, arrivals: Arrivals) -> None:
        self._copies = copies
        self._arrivals = arrivals

    @property
    def is_done(self) -> bool:
        """See Ticket."""
        try:
            return self._copies.query()
        except Exception:  # who waits for them is told what it was
            return True

    def wait(self) -> None:
        """See Ticket."""
        self._copies.synchronize()

    def when_done(self, call: Call) -> None:
        """See Ticket."""
        if self.is_done:
            call()
        else:
            self._arrivals.tell(self._copies, call)

    def precede(self, stream: torch.cuda.Stream) -> None:
        """See Before."""
        self._copies.precede(stream)


class StreamCopies:
    """Copies by a GPU beside its computation: one stream takes out, another one puts in."""

    def __init__(self, cache: LaneCache, num_staged: int) -> None:
        self._cache = cache
        self._device = cache.tables.device
        # Every token goes to the host by a copy; what a pass is given comes with its commands.
        self._out = CopyStream(self._device, "save", num_batches=1)
        self._in = CopyStream(self._device, "restore", num_batches=2)
        has_state = any(stack.numel() for stack in cache.state_stacks)
        self._staged = deque(_Staged(cache) for _ in range(num_staged if has_state else 0))
        # By lane: saves that read it; its restore; saves that read what it was before, which its
        # next pass comes after.
        self._saves: dict[int, list[Delivery]] = defaultdict(list)
        self._restores: dict[int, Delivery] = {}
        self._before_use: dict[int, list[Delivery]] = defaultdict(list)
        self._held: list[tuple[Delivery | _Now, object]] = []
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
    ) -> Arrival:
        """See LaneCopies. The state is first copied on the device, in the order of the passes."""
        with torch.cuda.device(self._device):
            copies = self._take_out(lane, runs, row_region, state_region, end)
        return _Queued(copies, self._saved)

    def _take_out(
        self,
        lane: int,
        runs: Sequence[range],
        row_region: memoryview | None,
        state_region: memoryview | None,
        end: int,
    ) -> Delivery | _Now:
        staged = None if state_region is None else self._stage(end)
        regions = [region for region in (row_region, state_region) if region is not None]
        if sum(region.nbytes for region in regions) <= SMALL_BYTES:
            return self._save_now(lane, runs, row_region, state_region, staged)
        begun = _Now(self._computing)
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
        delivery = self._in.put([_Now(self._computing), *saves, *after], pairs)
        self._restores[lane] = delivery
        self._hold(delivery, memory)
        return _Queued(delivery, self._restored)

    def use(self, lanes: Sequence[int]) -> None:
        """See LaneCopies. Copies that are not all queued yet are queued now."""
        self._let_go()
        for lane in lanes:
            for delivery in self._before_use.pop(lane, []):
                self._out.precede(delivery, self._computing)
            restore = self._restores.get(lane)
            if restore is not None:
                self._in.precede(restore, self._computing)
                if restore.query():
                    del self._restores[lane]

    def rewrite(self, lane: int) -> None:
        """See LaneCopies. A restore that nobody wants any more is left where it is."""
        restore = self._restores.pop(lane, None)
        if restore is not None and self._in.cancel(restore):
            restore.precede(self._computing)
        saves = [*self._before_use[lane], *self._saves.pop(lane, [])]
        self._before_use[lane] = _on_their_way(saves)

    def close(self) -> None:
        """See LaneCopies."""
        self._out.close()
        self._in.close()
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
    ) -> _Now:
        """Copies between the passes: handing them to a thread would take longer."""
        pairs = [] if row_region is None else self._gathered(lane, runs, row_region)
        if staged is not None and state_region is not None:
            pairs.append((torch.frombuffer(state_region, dtype=torch.uint8), staged.bytes))
            staged.taken = None
        copy_beside(pairs)
        arrival = _Now(self._computing)
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
            self._out.precede(staged.taken, self._computing)
        for place, stack in zip(staged.stacks, self._cache.state_stacks, strict=True):
            place.copy_(stack[:, end])
        return staged

    def _hold(self, copies: Delivery | _Now, memory: object) -> None:
        """Keep host memory until it has been read or written."""
        self._let_go()
        self._held.append((copies, memory))

    def _let_go(self) -> None:
        """Also without a further copy: where memory is full there will be none before."""
        self._held = [(copies, held) for copies, held in self._held if not copies.query()]


def _on_their_way(deliveries: Sequence[Delivery]) -> list[Delivery]:
    return [delivery for delivery in deliveries if not delivery.query()]


def _into(region: memoryview, blocks: Iterable[Block]) -> Iterator[Pair]:
    target = torch.frombuffer(region, dtype=torch.uint8)
    for source, begin in blocks:
        yield target[begin : begin + source.numel()], source
