"""Which chunks of one lane have a page, and where its rows lie. Pure: no tensors.

A row's row_index is the number of rows before it whose chunks are here. Places, masks and tables go by
row_indices, so that chunks that are not here leave no gap; the position is for rotation alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from luceasync.kv.pages import CHUNK_TOKENS, num_chunks


class Residents:
    """A lane's resident chunks, in order, and the page of each."""

    def __init__(self) -> None:
        self._chunks: list[int] = []
        self._pages: list[int] = []
        self._num_in_order = 0  # pages that lie one behind the other from the first one on

    def __repr__(self) -> str:
        return f"Residents({dict(zip(self._chunks, self._pages, strict=True))})"

    @property
    def pages(self) -> Sequence[int]:
        """The pages of the resident chunks, in order of chunk."""
        return self._pages

    @property
    def last(self) -> int | None:
        """The last chunk that is here; None where none is."""
        return self._chunks[-1] if self._chunks else None

    def spans(self, begin: int, end: int) -> list[tuple[int, int, bool]]:
        """Tokens `[begin, end)` cut where they begin or cease to be here; whether each span is."""
        spans: list[tuple[int, int, bool]] = []
        for chunk in range(begin // CHUNK_TOKENS, num_chunks(end)):
            at = bisect_left(self._chunks, chunk)
            is_here = self._chunks[at : at + 1] == [chunk]
            first = max(begin, chunk * CHUNK_TOKENS)
            last = min(end, (chunk + 1) * CHUNK_TOKENS)
            if spans and spans[-1][2] == is_here:
                first = spans.pop()[0]
            spans.append((first, last, is_here))
        return spans

    @property
    def num_absent_tokens(self) -> int:
        """Tokens before the last resident chunk that are not here: what is written next has a row_index
        that is so much less than its position.
        """
        return (self._chunks[-1] + 1 - len(self._chunks)) * CHUNK_TOKENS if self._chunks else 0

    def put(self, chunk: int, page: int) -> None:
        """The chunk is in this page from now on."""
        at = bisect_left(self._chunks, chunk)
        if at == len(self._chunks) or self._chunks[at] != chunk:
            self._chunks.insert(at, chunk)
            self._pages.insert(at, page)
        self._pages[at] = page
        self._count_from(at)

    def drop(self, chunk: int) -> None:
        """The chunk is not here any more."""
        at = self._index(chunk)
        del self._chunks[at], self._pages[at]
        self._count_from(at)

    def clear(self) -> None:
        """Nothing is here."""
        self._chunks.clear()
        self._pages.clear()
        self._num_in_order = 0

    def row_index(self, token: int) -> int:
        """The row_index of the token, or of the end of the tokens before it."""
        chunk, rest = divmod(token, CHUNK_TOKENS)
        at = bisect_left(self._chunks, chunk) if rest == 0 else self._index(chunk)
        return at * CHUNK_TOKENS + rest

    def is_in_order(self, row_index: int) -> bool:
        """Whether the rows of the row_indices before `row_index` lie one behind the other."""
        return row_index <= self._num_in_order * CHUNK_TOKENS

    def runs(self, begin: int, end: int) -> list[range]:
        """Places of the row_indices `[begin, end)`, in order: as few ranges as there can be."""
        assert end <= len(self._pages) * CHUNK_TOKENS, f"no page for row_index {end - 1} in {self}"
        if self.is_in_order(end):
            return [range(begin, end)]
        runs: list[range] = []
        for at in range(begin // CHUNK_TOKENS, num_chunks(end)):
            move = (self._pages[at] - at) * CHUNK_TOKENS
            first = max(begin, at * CHUNK_TOKENS) + move
            last = min(end, (at + 1) * CHUNK_TOKENS) + move
            if runs and runs[-1].stop == first:
                first = runs.pop().start
            runs.append(range(first, last))
        return runs

    def _index(self, chunk: int) -> int:
        at = bisect_left(self._chunks, chunk)
        assert self._chunks[at : at + 1] == [chunk], f"chunk {chunk} is not among {self}"
        return at

    def _count_from(self, changed: int) -> None:
        """Count the pages in order again, where one has changed at index `changed`."""
        at = min(self._num_in_order, changed)
        while at < len(self._pages) and self._pages[at] == at:
            at += 1
        self._num_in_order = at
