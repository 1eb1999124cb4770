"""Which chunks of one lane have a page where there are fewer pages than chunks. Pure: no tensors.

A change is worked out whole and then applied, so that whoever has to act in between may fail: then
nothing has changed. One that would leave no victim is refused whole. Knows no policy: scores come.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SINK_CHUNKS = 1  # the first ones, which every row attends to (Xiao et al., 2023)
TAIL_CHUNKS = 4  # the newest ones
MIN_PAGES = SINK_CHUNKS + TAIL_CHUNKS + 2  # one to be written, one to be evicted


def min_pages(batch_chunks: int) -> int:
    """Pages without which a lane that grows by so many chunks at a time would find no victim."""
    return max(MIN_PAGES, SINK_CHUNKS + 1 + batch_chunks)


class NoVictim(ValueError):
    """A change needs more pages than are free or may be taken from a chunk."""


@dataclass(frozen=True, slots=True)
class ResidencyChange:
    """`evicted` chunks lose their pages, which may be among those `given` as (chunk, page); both in
    rising order of chunk. The lane then has `num_chunks` chunks. `version`: of the map that it
    belongs to.
    """

    num_chunks: int
    evicted: tuple[int, ...]
    given: tuple[tuple[int, int], ...]
    version: int


class Residency:
    """Chunk -> page of one lane. `order`: in which pages are handed out at first; `batch_chunks`:
    how many chunks the lane grows by at most at a time.
    """

    def __init__(
        self, num_pages: int, order: Sequence[int] | None = None, batch_chunks: int = 1
    ) -> None:
        least = min_pages(batch_chunks)
        assert num_pages >= least, f"{num_pages} pages are fewer than {least}"
        self.num_pinnable = num_pages - least  # chunks, besides the sink
        self._order = tuple(range(num_pages) if order is None else order)
        assert sorted(self._order) == list(range(num_pages)), "order must name every page once"
        self._version = 0
        self.num_chunks = 0
        self._pages: dict[int, int] = {}
        self._free = deque(self._order)
        self._pinned: frozenset[int] = frozenset()
        self._scores: dict[int, float] = {}
        self._stamps: dict[int, int] = {}  # when a chunk was given its page: older ones leave first
        self._clock = 0

    def __repr__(self) -> str:
        return f"Residency({len(self._pages)} of {self.num_chunks} chunks, version {self._version})"

    @property
    def version(self) -> int:
        """Goes up with every change."""
        return self._version

    @property
    def num_pages(self) -> int:
        """Pages that there are."""
        return len(self._order)

    @property
    def pages(self) -> Mapping[int, int]:
        """The page of each resident chunk."""
        return self._pages

    @property
    def pinned(self) -> frozenset[int]:
        """Chunks that keep their pages, here or still to come."""
        return self._pinned

    @property
    def num_absent(self) -> int:
        """Chunks that have no page."""
        return self.num_chunks - len(self._pages)

    @property
    def scores(self) -> Mapping[int, float]:
        """What chunks are worth, as far as somebody has said it."""
        return self._scores

    def score(self, chunk: int) -> float:
        """What the chunk is worth; infinite for those of which nobody has said it."""
        return self._scores.get(chunk, math.inf)

    def is_protected(self, chunk: int) -> bool:
        """Whether the chunk keeps its page as long as the lane does not grow."""
        return self._is_kept(chunk, self.num_chunks - TAIL_CHUNKS)

    # --- what a change would be: nothing changes -------------------------------------------------

    def extension(self, num_chunks: int) -> ResidencyChange:
        """Give all chunks below `num_chunks` that the lane does not have yet a page. Victims are
        those of least worth, the oldest first; neither the sink, nor what is pinned, nor the tail,
        nor what is being written. Raises NoVictim.
        """
        new = range(self.num_chunks, num_chunks)
        # The last chunk so far is written to the end first.
        kept_from = min(num_chunks - TAIL_CHUNKS, self.num_chunks - 1)
        return self._change(max(num_chunks, self.num_chunks), (), new, kept_from)

    def clearing(self, num_chunks: int) -> ResidencyChange:
        """Take pages from victims until so many chunks could be given one by `extension`, and give
        none. Raises NoVictim.
        """
        extension = self.extension(num_chunks)
        return ResidencyChange(self.num_chunks, extension.evicted, (), self._version)

    def reselection(self, margin: float, num_most: int) -> ResidencyChange:
        """Give absent chunks the pages of residents that are worth less: each at least `margin`
        times what its victim is, at most `num_most` of them. Pages that are free are given first.
        """
        pages, num_chunks = self._pages, self.num_chunks
        valued = ((s, c) for c, s in self._scores.items() if c not in pages and c < num_chunks)
        absent = [chunk for _, chunk in heapq.nlargest(num_most, valued)]
        victims = self._victims(self.num_chunks - TAIL_CHUNKS)
        chosen: list[int] = []
        evicted: list[int] = []
        num_free = len(self._free)
        for chunk in absent:
            if len(chosen) < num_free:
                chosen.append(chunk)
                continue
            at = len(evicted)
            if at == len(victims) or not self.score(chunk) > margin * self.score(victims[at]):
                break
            chosen.append(chunk)
            evicted.append(victims[at])
        return self._change(self.num_chunks, evicted, sorted(chosen), self.num_chunks)

    def placement(self, num_chunks: int) -> ResidencyChange:
        """Give pages to a lane that has none: to the sink, the tail, what is pinned, and of the
        others to those of most worth, the newest first.
        """
        assert not self._pages, f"a lane without pages is expected: {self}"
        tail_from = num_chunks - TAIL_CHUNKS
        order = sorted(
            range(num_chunks),
            key=lambda c: (not self._is_kept(c, tail_from), -self._worth(c), -c),
        )
        chosen = sorted(order[: self.num_pages])
        return self._change(num_chunks, (), chosen, tail_from)

    # --- what changes ----------------------------------------------------------------------------

    def apply(self, change: ResidencyChange) -> None:
        """Make it so. Raises ValueError for a change that was worked out for an older map."""
        if change.version != self._version:
            raise ValueError(f"a change of version {change.version}, for {self}")
        for chunk in change.evicted:
            self._free.append(self._pages.pop(chunk))
            del self._stamps[chunk]
        for chunk, page in change.given:
            self._free.remove(page)
            self._pages[chunk] = page
            self._clock += 1
            self._stamps[chunk] = self._clock
        self.num_chunks = change.num_chunks
        self._version += 1

    def value(self, scores: Mapping[int, float]) -> None:
        """What chunks are worth from now on, in place of all that was said; no number is none."""
        self._scores = {c: 0.0 if math.isnan(s) else s for c, s in scores.items()}
        self._version += 1

    def pin(self, chunks: Iterable[int]) -> None:
        """These keep their pages once they have them. Raises NoVictim where no other could grow
        any more beside them.
        """
        pinned = self._pinned | frozenset(chunks)
        beside = len(pinned - set(range(SINK_CHUNKS)))
        if beside > self.num_pinnable:
            raise NoVictim(f"{beside} chunks are to be pinned, of which {self.num_pinnable} may be")
        self._pinned = pinned
        self._version += 1

    def unpin_all(self) -> None:
        """None is pinned."""
        self._pinned = frozenset()
        self._version += 1

    def clear(self) -> None:
        """The lane is empty: no chunk, no score and no pin is left."""
        self.num_chunks = 0
        self._pages.clear()
        self._free = deque(self._order)
        self._pinned = frozenset()
        self._scores = {}
        self._stamps.clear()
        self._version += 1

    # --- how it is worked out --------------------------------------------------------------------

    def _change(
        self, num_chunks: int, evicted: Iterable[int], new: Sequence[int], kept_from: int
    ) -> ResidencyChange:
        """With the victims that are missing beside those that are `evicted` already."""
        gone = [*evicted]
        num_missing = len(new) - len(self._free) - len(gone)
        if num_missing > 0:
            victims = self._victims(kept_from)
            if len(victims) < num_missing:
                raise NoVictim(f"{len(new)} chunks want pages, {len(victims)} leave one: {self}")
            gone += victims[:num_missing]
        free = [*self._free, *(self._pages[chunk] for chunk in gone)]
        given = tuple(zip(new, free, strict=False))
        return ResidencyChange(num_chunks, tuple(sorted(gone)), given, self._version)

    def _victims(self, kept_from: int) -> list[int]:
        """Residents that may leave, in the order in which they do."""
        leaving = (chunk for chunk in self._pages if not self._is_kept(chunk, kept_from))
        return sorted(leaving, key=lambda c: (self.score(c), self._stamps[c]))

    def _is_kept(self, chunk: int, kept_from: int) -> bool:
        return chunk < SINK_CHUNKS or chunk >= kept_from or chunk in self._pinned

    def _worth(self, chunk: int) -> float:
        return self._scores.get(chunk, 0.0)


def chunks_of(spans: Iterable[tuple[int, int]], chunk_tokens: int) -> frozenset[int]:
    """The chunks that tokens `[begin, end)` of the spans touch."""
    return frozenset(
        chunk
        for begin, end in spans
        for chunk in range(begin // chunk_tokens, -(-end // chunk_tokens))
        if end > begin
    )
