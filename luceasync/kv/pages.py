"""Which page of a lane holds which chunk of its tokens. Pure: no tensors.

A chunk is 64 logical tokens, a page a place for one in the lane's rows. With as many pages as the
context has chunks every chunk gets one for good: exact attention. The map has one owner; groups
follow its events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_TOKENS = 64


def num_chunks(num_tokens: int) -> int:
    """Chunks that `num_tokens` tokens touch."""
    return -(-num_tokens // CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class PageEvent:
    """Chunk `chunk` of `lane` now lives in `page`; None: it is not here any more."""

    lane: int
    chunk: int
    page: int | None


class PageMap:
    """Chunk -> page, for every lane. `order` is the order in which a lane's pages are handed
    out.
    """

    def __init__(self, num_lanes: int, num_pages: int, order: Sequence[int] | None = None) -> None:
        self._order = tuple(range(num_pages) if order is None else order)
        assert sorted(self._order) == list(range(num_pages)), "order must name every page once"
        self._pages: list[list[int]] = [[] for _ in range(num_lanes)]

    def __repr__(self) -> str:
        used = ", ".join(f"{lane}: {len(pages)}" for lane, pages in enumerate(self._pages))
        return f"PageMap({len(self._order)} pages a lane; used {used})"

    def pages(self, lane: int) -> tuple[int, ...]:
        """The pages of the lane's chunks, in order of chunk."""
        return tuple(self._pages[lane])

    def num_tokens(self, lane: int) -> int:
        """How many tokens the lane has pages for."""
        return len(self._pages[lane]) * CHUNK_TOKENS

    def extend(self, lane: int, num_tokens: int) -> list[PageEvent]:
        """Give every chunk of the lane's first `num_tokens` tokens a page; the new ones, as
        events.
        """
        pages = self._pages[lane]
        begin, end = len(pages), num_chunks(num_tokens)
        assert end <= len(self._order), f"{num_tokens} tokens do not fit {len(self._order)} pages"
        pages.extend(self._order[begin:end])
        return [PageEvent(lane, chunk, pages[chunk]) for chunk in range(begin, end)]

    def release(self, lane: int) -> None:
        """Take every page of the lane back."""
        self._pages[lane].clear()
