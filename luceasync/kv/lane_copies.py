"""Bytes between a lane and host memory, so that nobody waits for them.

Owns the order of these copies and of what else happens to a lane, and keeps memory alive while they
are under way. Knows no node: it is told which bytes go where. Engine thread only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from luceasync.cyext.flatten import fill
from luceasync.kv.cache import LaneCache
from luceasync.kv.host import PIECE_BYTES

Block = tuple[Tensor, int]  # bytes of a lane, where they begin in a region of host memory
Pair = tuple[Tensor, Tensor]  # bytes of a lane, as many bytes of host memory


class Arrival(Protocol):
    """The end of copies that were queued."""

    def query(self) -> bool:
        """Whether they have arrived."""
        ...

    def synchronize(self) -> None:
        """Wait until they have arrived."""
        ...


class LaneCopies(Protocol):
    """Copies out of lanes and into them. All bytes are uint8 [bytes]."""

    def save(
        self,
        lane: int,
        rows: Sequence[Block],
        row_region: memoryview | None,
        state_region: memoryview | None,
    ) -> Arrival:
        """Copy the rows, in rising order, and all recurrent state where a region is given for it.
        The lane may change afterwards, as far as `use` and `rewriting` are told.
        """
        ...

    def restore(self, lane: int, pairs: Sequence[Pair], after: Sequence[Arrival]) -> None:
        """Copy into the lane, once the saves `after` have arrived."""
        ...

    def use(self, lanes: Sequence[int]) -> None:
        """What is queued from here on may read and write these lanes."""
        ...

    def rewriting(self, lane: int) -> AbstractContextManager[object]:
        """The lane's next tokens begin at 0; inside it its recurrent state is forgotten."""
        ...

    def settled(self, lane: int) -> bool:
        """Whether the last restore of the lane has arrived."""
        ...

    def settle(self, lane: int) -> None:
        """Wait for the last restore of the lane."""
        ...

    def close(self) -> None:
        """Wait for everything. May be called twice."""
        ...


def lane_copies(cache: LaneCache, num_staged: int) -> LaneCopies:
    """The copies of the lanes' device; a GPU stages `num_staged` recurrent states."""
    if cache.tables.is_cuda:
        return StreamCopies(cache, num_staged)
    return DirectCopies(cache)


class _Arrived:
    """Copies that were made at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """They are there."""


class DirectCopies:
    """Copies by the CPU, made when they are asked for; other threads run meanwhile."""

    def __init__(self, cache: LaneCache) -> None:
        self._cache = cache

    def save(
        self,
        lane: int,
        rows: Sequence[Block],
        row_region: memoryview | None,
        state_region: memoryview | None,
    ) -> Arrival:
        """See LaneCopies."""
        if row_region is not None:
            fill(row_region, [at for _, at in rows], [source.numpy() for source, _ in rows])
        if state_region is not None:
            sources = [source.numpy() for source in self._cache.state_bytes(lane).values()]
            ends = [0]
            for source in sources:
                ends.append(ends[-1] + source.nbytes)
            fill(state_region, ends[:-1], sources)
        return _Arrived()

    def restore(self, lane: int, pairs: Sequence[Pair], after: Sequence[Arrival]) -> None:
        """See LaneCopies."""
        for target, source in pairs:
            target.copy_(source)

    def use(self, lanes: Sequence[int]) -> None:
        """Nothing is under way."""

    def rewriting(self, lane: int) -> AbstractContextManager[object]:
        """See LaneCopies."""
        return nullcontext()

    def settled(self, lane: int) -> bool:
        """See LaneCopies."""
        return True

    def settle(self, lane: int) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


class _Staged:
    """A recurrent state on its way out: it changes in the lane with the next step."""

    def __init__(self, cache: LaneCache) -> None:
        stacks = [stack[:, 0] for stack in cache.state_stacks]
        num_bytes = [stack.numel() * stack.element_size() for stack in stacks]
        self.bytes = torch.empty(sum(num_bytes), dtype=torch.uint8, device=cache.tables.device)
        parts = zip(self.bytes.split(num_bytes), stacks, strict=True)
        self.stacks = [part.view(stack.dtype).view(stack.shape) for part, stack in parts]
        self.free: torch.cuda.Event | None = None


class StreamCopies:
    """Copies by a GPU beside its computation: one stream takes out, another one puts in."""

    def __init__(self, cache: LaneCache, num_staged: int) -> None:
        self._cache = cache
        self._device = cache.tables.device
        self._saving, self._restoring = (torch.cuda.Stream(self._device) for _ in range(2))
        has_state = any(stack.numel() for stack in cache.state_stacks)
        self._staged = deque(_Staged(cache) for _ in range(num_staged if has_state else 0))
        self._saves: dict[int, list[torch.cuda.Event]] = defaultdict(list)  # by lane
        self._restores: dict[int, torch.cuda.Event] = {}  # by lane
        self._before_use: dict[int, list[torch.cuda.Event]] = {}  # by lane
        self._held: list[tuple[torch.cuda.Event, list[Tensor]]] = []

    def save(
        self,
        lane: int,
        rows: Sequence[Block],
        row_region: memoryview | None,
        state_region: memoryview | None,
    ) -> Arrival:
        """See LaneCopies. The state is first copied on the device, in the order of the steps; if
        no place is free for it, the device waits for one, not the host.
        """
        staged = None if state_region is None else self._stage(lane)
        begun = self._computing.record_event()
        held: list[Tensor] = []
        with torch.cuda.stream(self._saving):
            self._saving.wait_event(begun)
            if staged is not None and state_region is not None:
                held.append(torch.frombuffer(state_region, dtype=torch.uint8))
                _copy_out(held[-1], staged.bytes)
                staged.free = self._saving.record_event()
            if row_region is not None:
                held.append(torch.frombuffer(row_region, dtype=torch.uint8))
                for source, begin in rows:
                    _copy_out(held[-1][begin : begin + source.numel()], source)
            done = self._saving.record_event()
        self._saves[lane] = [*_unfinished(self._saves[lane]), done]
        self._hold(done, held)
        return done

    def restore(self, lane: int, pairs: Sequence[Pair], after: Sequence[Arrival]) -> None:
        """See LaneCopies."""
        begun = self._computing.record_event()
        with torch.cuda.stream(self._restoring):
            for event in (begun, *self._before_use.pop(lane, []), *after):
                self._restoring.wait_event(event)
            for target, source in pairs:
                for begin, end in pieces(source.data_ptr(), source.numel()):
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
            done = self._restoring.record_event()
        self._restores[lane] = done
        self._before_use[lane] = [done]
        self._hold(done, [source for _, source in pairs])

    def use(self, lanes: Sequence[int]) -> None:
        """See LaneCopies."""
        for lane in lanes:
            for event in self._before_use.pop(lane, []):
                self._computing.wait_event(event)

    @contextmanager
    def rewriting(self, lane: int) -> Iterator[None]:
        """See LaneCopies. A restore that nobody wants any more holds up no other lane."""
        barriers = [*self._before_use.pop(lane, []), *self._saves.pop(lane, [])]
        restore = self._restores.pop(lane, None)
        if restore is None or restore.query():
            yield
        else:
            self._restoring.wait_event(self._computing.record_event())
            with torch.cuda.stream(self._restoring):
                yield
                barriers.append(self._restoring.record_event())
        self._before_use[lane] = _unfinished(barriers)

    def settled(self, lane: int) -> bool:
        """See LaneCopies."""
        restore = self._restores.get(lane)
        return restore is None or restore.query()

    def settle(self, lane: int) -> None:
        """See LaneCopies."""
        if lane in self._restores:
            self._restores[lane].synchronize()

    def close(self) -> None:
        """See LaneCopies."""
        self._saving.synchronize()
        self._restoring.synchronize()
        self._held.clear()
        self._staged.clear()

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _stage(self, lane: int) -> _Staged | None:
        if not self._staged:
            return None
        staged = self._staged[0]
        self._staged.rotate(-1)
        if staged.free is not None:
            self._computing.wait_event(staged.free)
        for place, stack in zip(staged.stacks, self._cache.state_stacks, strict=True):
            place.copy_(stack[:, lane])
        return staged

    def _hold(self, done: torch.cuda.Event, tensors: list[Tensor]) -> None:
        self._held = [(event, held) for event, held in self._held if not event.query()]
        self._held.append((done, tensors))


def pieces(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Parts `[begin, end)` of host memory at `address` that cross no multiple of PIECE_BYTES."""
    begin = 0
    while begin < num_bytes:
        end = min(num_bytes, begin + PIECE_BYTES - (address + begin) % PIECE_BYTES)
        yield begin, end
        begin = end


def _copy_out(target: Tensor, source: Tensor) -> None:
    for begin, end in pieces(target.data_ptr(), target.numel()):
        target[begin:end].copy_(source[begin:end], non_blocking=True)


def _unfinished(events: Sequence[torch.cuda.Event]) -> list[torch.cuda.Event]:
    return [event for event in events if not event.query()]
