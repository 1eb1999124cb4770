"""Rows of lanes that are in host memory only: where they lie, and how they return to pages.

Holds tensors, not nodes: dropping a node changes nothing here. Engine thread only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from luceasync.host_cache.copies import HostRows, LaneCopies, PageRows, SaveTicket
from luceasync.host_cache.copy_stream import Ticket
from luceasync.kv.cache import LaneCache, TensorKey
from luceasync.kv.pages import CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class _HeldRows:
    """Tokens `[begin, end)` are the first rows of each of `tensors`."""

    begin: int
    end: int
    tensors: Mapping[TensorKey, Tensor]
    arrival: SaveTicket | None

    @property
    def has_arrived(self) -> bool:
        return self.arrival is None or self.arrival.is_done


class AbsentRows:
    """The rows of each lane of a shard that are read from host memory while they have no page."""

    def __init__(self, cache: LaneCache, copies: LaneCopies) -> None:
        self._cache = cache
        self._copies = copies
        self._has_rows = bool(cache.row_stacks)
        self._held: dict[int, list[_HeldRows]] = defaultdict(list)
        self._to_order: set[int] = set()  # lanes whose next pass waits for copies of their pages

    def hold(
        self,
        lane: int,
        begin: int,
        end: int,
        tensors: Mapping[TensorKey, Tensor],
        arrival: SaveTicket | None,
    ) -> None:
        """The first rows of these tensors are those of the lane's tokens `[begin, end)`. Rows
        already held for these tokens are equal, and are dropped."""
        held = self._held[lane]
        held[:] = [each for each in held if each.begin < begin or each.end > end]
        held.append(_HeldRows(begin, end, tensors, arrival))

    def of(self, lane: int, *, with_coming: bool) -> LaneHostRows:
        """The rows of one lane; `with_coming`: including rows that have not arrived yet."""
        return LaneHostRows(self, lane, with_coming)

    def held_until(self, lane: int, begin: int, end: int, *, with_coming: bool) -> int:
        """The end of the part of `[begin, end)` whose rows are in host memory, or will be."""
        while begin < end:
            held = (each for each in self._held.get(lane, ()) if each.begin <= begin < each.end)
            ends = (each.end for each in held if with_coming or each.has_arrived)
            last = min(end, max(ends, default=begin))
            if last == begin:
                break
            begin = last
        return begin

    def rows(self, lane: int, begin: int, end: int) -> list[HostRows]:
        """Where the lane's tokens `[begin, end)` lie, in order, in as few pieces as possible."""
        found: list[HostRows] = []
        while self._has_rows and begin < end:
            covering = [h for h in self._held[lane] if h.begin <= begin < h.end]
            assert covering, f"token {begin} of lane {lane} is nowhere in host memory"
            best = max(covering, key=lambda held: held.end)
            last = min(end, best.end)
            on_way = best.arrival if best.arrival is None or not best.arrival.is_done else None
            found.append(HostRows(begin, last, begin - best.begin, best.tensors, on_way))
            begin = last
        return found

    def copy(self, lane: int, first: int, targets: Mapping[TensorKey, Tensor]) -> None:
        """Copy the rows that have no page, of the lane's tokens from `first` on, to `targets`,
        [tokens, ...] each, once they have arrived.
        """
        num_tokens = max((len(target) for target in targets.values()), default=0)
        for begin, end, is_here in self._cache.spans(lane, first, first + num_tokens):
            for part in () if is_here else self.rows(lane, begin, end):
                if part.arrival is not None:
                    part.arrival.wait()
                for key, target in targets.items():
                    source = part.tensors[key][part.first : part.first + part.num_rows]
                    target[part.begin - first : part.end - first].copy_(source)

    def recall(self, lane: int, places: Sequence[tuple[int, int]]) -> Ticket:
        """Fill pages that no table lists yet with chunks: (chunk, page) each. Passes go on
        meanwhile; passes over the lane see these chunks after `placed`."""
        found = []
        for chunk, page in places:
            begin = chunk * CHUNK_TOKENS
            for part in self.rows(lane, begin, begin + CHUNK_TOKENS):
                found.append(PageRows(part, page * CHUNK_TOKENS + part.begin - begin))
        return self._copies.page_in(lane, found)

    def fill(self, lane: int, num_tokens: int) -> Ticket:
        """Fill all listed pages with the lane's first tokens, before its next pass."""
        found = []
        for begin, end, is_here in self._cache.spans(lane, 0, num_tokens):
            for part in self.rows(lane, begin, end) if is_here else ():
                rest = part
                for run in self._cache.runs(lane, part.begin, part.end):
                    cut = replace(rest, end=rest.begin + len(run))
                    found.append(PageRows(cut, run.start))
                    rest = replace(rest, begin=cut.end, first=rest.first + len(run))
        self._to_order.add(lane)
        return self._copies.page_in(lane, found)

    def placed(self, lane: int) -> None:
        """Pages of the lane have been listed or removed: its next pass runs after the copies that
        still fill or read them."""
        if lane in self._held:
            self._to_order.add(lane)

    def use(self, lanes: Sequence[int]) -> None:
        """Work queued from here on may read and write the pages of these lanes."""
        for lane in self._to_order.intersection(lanes):
            self._to_order.discard(lane)
            self._copies.freed(lane)
            self._copies.listed(lane)

    def reset(self, lane: int) -> None:
        """Forget all rows of the lane."""
        self._held.pop(lane, None)
        self._to_order.discard(lane)

    def close(self) -> None:
        """Forget everything."""
        self._held.clear()


@dataclass(frozen=True, slots=True)
class LaneHostRows:
    """The rows of one lane, as read by staging."""

    absent: AbsentRows
    lane: int
    with_coming: bool

    def rows(self, begin: int, end: int) -> list[HostRows]:
        return self.absent.rows(self.lane, begin, end)

    def held_until(self, begin: int, end: int) -> int:
        return self.absent.held_until(self.lane, begin, end, with_coming=self.with_coming)
