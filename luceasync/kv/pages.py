"""The page of each chunk of a lane. Pure: no tensors.

A chunk is 64 logical tokens; a page is a place for one chunk in the lane's rows. With as many pages
as the context has chunks, each chunk keeps its page: exact attention. The map has one owner; stages
follow its events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_TOKENS = 64


def num_chunks(num_tokens: int) -> int:
    """Chunks that `num_tokens` tokens occupy, the last one perhaps in part."""
    return -(-num_tokens // CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class PageEvent:
    """Chunk `chunk` of `lane` moved to `page`, or left the device if `page` is None."""

    lane: int
    chunk: int
    page: int | None


class PageMap:
    """Chunk -> page of every lane; a lane takes its pages in `order`."""

    def __init__(self, num_lanes: int, num_pages: int, order: Sequence[int] | None = None) -> None:
        self._order = tuple(range(num_pages) if order is None else order)
        assert sorted(self._order) == list(range(num_pages)), "order must name every page once"
        self._pages: list[list[int]] = [[] for _ in range(num_lanes)]

    def __repr__(self) -> str:
        used = ", ".join(f"{lane}: {len(pages)}" for lane, pages in enumerate(self._pages))
        return f"PageMap({len(self._order)} pages a lane; used {used})"

    def pages(self, lane: int) -> tuple[int, ...]:
        """Pages of the lane's chunks, in chunk order."""
        return tuple(self._pages[lane])

    def num_tokens(self, lane: int) -> int:
        """Number of tokens the lane has pages for."""
        return len(self._pages[lane]) * CHUNK_TOKENS

    def extend(self, lane: int, num_tokens: int) -> list[PageEvent]:
        """Give a page to every chunk of the lane's first `num_tokens` tokens. Returns events for
        the new ones.
        """
        pages = self._pages[lane]
        begin, end = len(pages), num_chunks(num_tokens)
        assert end <= len(self._order), f"{num_tokens} tokens do not fit {len(self._order)} pages"
        pages.extend(self._order[begin:end])
        return [PageEvent(lane, chunk, pages[chunk]) for chunk in range(begin, end)]

    def release(self, lane: int) -> None:
        """Free all pages of the lane."""
        self._pages[lane].clear()
