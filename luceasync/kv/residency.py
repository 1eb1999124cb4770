"""Which chunks of one lane have a page when there are fewer pages than chunks. Pure: no tensors.

A change is computed as a whole and applied later, so that a save in between may fail and leave the
lane unchanged. Holds scores, but does not know how they are computed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SINK_CHUNKS = 1  # the first chunks, which every row attends to (Xiao et al., 2023)
TAIL_CHUNKS = 4  # the newest chunks
MIN_PAGES = SINK_CHUNKS + TAIL_CHUNKS + 2  # one being written, one to evict


def min_pages(batch_chunks: int) -> int:
    """The fewest pages with which a lane that grows `batch_chunks` at a time finds victims."""
    return max(MIN_PAGES, SINK_CHUNKS + 1 + batch_chunks)


class NoVictim(ValueError):
    """More pages are needed than are free or may be evicted."""


@dataclass(frozen=True, slots=True)
class ResidencyChange:
    """Chunks `evicted` lose their pages, which may be among those `given` as (chunk, page); both in
    chunk order. The lane then has `num_chunks` chunks. Valid for `version` of the map alone.
    """

    num_chunks: int
    evicted: tuple[int, ...]
    given: tuple[tuple[int, int], ...]
    version: int


class Residency:
    """Chunk -> page of one lane. `order`: in which free pages are first handed out; `batch_chunks`:
    the most chunks that the lane grows by at once.
    """

    def __init__(
        self, num_pages: int, order: Sequence[int] | None = None, batch_chunks: int = 1
    ) -> None:
        min_num_pages = min_pages(batch_chunks)
        assert num_pages >= min_num_pages, f"{num_pages} pages; at least {min_num_pages} needed"
        self.num_pinnable = num_pages - min_num_pages  # chunks, besides the sink
        self._order = tuple(range(num_pages) if order is None else order)
        assert sorted(self._order) == list(range(num_pages)), "order must name every page once"
        self._version = 0
        self.num_chunks = 0
        self._pages: dict[int, int] = {}
        self._free = deque(self._order)
        self._pinned: frozenset[int] = frozenset()
        self._scores: dict[int, float] = {}
        self._stamps: dict[
            int, int
        ] = {}  # when a chunk got its page; among equal scores the oldest are evicted
        self._clock = 0

    def __repr__(self) -> str:
        return f"Residency({len(self._pages)} of {self.num_chunks} chunks, version {self._version})"

    @property
    def version(self) -> int:
        """Incremented by every change."""
        return self._version

    @property
    def num_pages(self) -> int:
        """All pages of the lane."""
        return len(self._order)

    @property
    def pages(self) -> Mapping[int, int]:
        """The page of each resident chunk."""
        return self._pages

    @property
    def pinned(self) -> frozenset[int]:
        """Chunks that keep their pages, including those not written yet."""
        return self._pinned

    @property
    def num_absent(self) -> int:
        """Chunks without a page."""
        return self.num_chunks - len(self._pages)

    @property
    def scores(self) -> Mapping[int, float]:
        """Scores of chunks, as far as they are known."""
        return self._scores

    def score(self, chunk: int) -> float:
        """The chunk's score; infinite if unknown."""
        return self._scores.get(chunk, math.inf)

    def is_protected(self, chunk: int) -> bool:
        """Whether the chunk keeps its page unless the lane grows."""
        return self._is_kept(chunk, self.num_chunks - TAIL_CHUNKS)

    # --- plan a change; nothing is modified ------------------------------------------------------

    def extension(self, num_chunks: int) -> ResidencyChange:
        """Give a page to every chunk below `num_chunks` that the lane does not have yet. Evict
        those of lowest score, the oldest first, but never the sink, pinned chunks, the tail, or the
        chunk being written. Raises NoVictim.
        """
        new = range(self.num_chunks, num_chunks)
        # The last chunk so far may be partial: it is filled first.
        kept_from = min(num_chunks - TAIL_CHUNKS, self.num_chunks - 1)
        return self._change(max(num_chunks, self.num_chunks), (), new, kept_from)

    def clearing(self, num_chunks: int) -> ResidencyChange:
        """Evict what `extension` would evict, but assign no pages. Raises NoVictim."""
        extension = self.extension(num_chunks)
        return ResidencyChange(self.num_chunks, extension.evicted, (), self._version)

    def reselection(self, margin: float, num_most: int) -> ResidencyChange:
        """Give absent chunks the pages of resident ones: each must have at least `margin` times the
        score of its victim, at most `num_most` chunks. Free pages are used first."""
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
        """Give pages to the chunks of a lane that has none: first the sink, the tail and pinned
        chunks, then by score, newest first."""
        assert not self._pages, f"the lane has pages already: {self}"
        tail_from = num_chunks - TAIL_CHUNKS
        order = sorted(
            range(num_chunks),
            key=lambda c: (not self._is_kept(c, tail_from), -self._worth(c), -c),
        )
        chosen = sorted(order[: self.num_pages])
        return self._change(num_chunks, (), chosen, tail_from)

    # --- apply a change --------------------------------------------------------------------------

    def apply(self, change: ResidencyChange) -> None:
        """Apply the change. Raises ValueError if it was planned for an older version."""
        if change.version != self._version:
            raise ValueError(f"the change is for version {change.version}, not for {self}")
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

    def score_all(self, scores: Mapping[int, float]) -> None:
        """Replace all scores; NaN counts as 0."""
        self._scores = {c: 0.0 if math.isnan(s) else s for c, s in scores.items()}
        self._version += 1

    def pin(self, chunks: Iterable[int]) -> None:
        """Keep these chunks resident from when they get pages. Raises NoVictim if the lane could
        not grow beside them.
        """
        pinned = self._pinned | frozenset(chunks)
        beside = len(pinned - set(range(SINK_CHUNKS)))
        if beside > self.num_pinnable:
            raise NoVictim(f"{beside} chunks would be pinned; at most {self.num_pinnable} may be")
        self._pinned = pinned
        self._version += 1

    def unpin_all(self) -> None:
        """Unpin all chunks."""
        self._pinned = frozenset()
        self._version += 1

    def clear(self) -> None:
        """Empty the lane: no chunks, no scores, no pins."""
        self.num_chunks = 0
        self._pages.clear()
        self._free = deque(self._order)
        self._pinned = frozenset()
        self._scores = {}
        self._stamps.clear()
        self._version += 1

    # ---------------------------------------------------------------------------------------------

    def _change(
        self, num_chunks: int, evicted: Iterable[int], new: Sequence[int], kept_from: int
    ) -> ResidencyChange:
        """Build a change, adding the victims that are missing beside those in `evicted`."""
        gone = [*evicted]
        num_missing = len(new) - len(self._free) - len(gone)
        if num_missing > 0:
            victims = self._victims(kept_from)
            if len(victims) < num_missing:
                raise NoVictim(f"{len(new)} chunks need pages, {len(victims)} can leave: {self}")
            gone += victims[:num_missing]
        free = [*self._free, *(self._pages[chunk] for chunk in gone)]
        given = tuple(zip(new, free, strict=False))
        return ResidencyChange(num_chunks, tuple(sorted(gone)), given, self._version)

    def _victims(self, kept_from: int) -> list[int]:
        """Resident chunks that may be evicted, in that order."""
        leaving = (chunk for chunk in self._pages if not self._is_kept(chunk, kept_from))
        return sorted(leaving, key=lambda c: (self.score(c), self._stamps[c]))

    def _is_kept(self, chunk: int, kept_from: int) -> bool:
        return chunk < SINK_CHUNKS or chunk >= kept_from or chunk in self._pinned

    def _worth(self, chunk: int) -> float:
        return self._scores.get(chunk, 0.0)


def chunks_of(spans: Iterable[tuple[int, int]], chunk_tokens: int) -> frozenset[int]:
    """Chunks that tokens `[begin, end)` of the spans overlap."""
    return frozenset(
        chunk
        for begin, end in spans
        for chunk in range(begin // chunk_tokens, -(-end // chunk_tokens))
        if end > begin
    )
