"""The resident chunks of one lane and the places of its rows. Pure: no tensors.

The row index of a token is the number of resident rows before it. Places, masks and tables go by
row index, so absent chunks leave no gap; only rotary embedding uses the position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from luceasync.kv.pages import CHUNK_TOKENS, num_chunks


class Residents:
    """The resident chunks of a lane in order, each with its page.

    chunks        0   1   2   3   4        pages      chunk 0 -> 2, chunk 3 -> 0, chunk 4 -> 1
    resident      x           x   x        row index of token 200 (chunk 3): 1 * 64 + 8 = 72
    row index     0           64  128      its place: page 0, so 0 * 64 + 8 = 8
    """

    def __init__(self) -> None:
        self._chunks: list[int] = []
        self._pages: list[int] = []
        self._num_in_order = 0  # pages 0, 1, 2, ... that the first chunks lie in

    def __repr__(self) -> str:
        return f"Residents({dict(zip(self._chunks, self._pages, strict=True))})"

    @property
    def pages(self) -> Sequence[int]:
        """Pages of the resident chunks, in chunk order."""
        return self._pages

    @property
    def last(self) -> int | None:
        """The last resident chunk, or None."""
        return self._chunks[-1] if self._chunks else None

    def spans(self, begin: int, end: int) -> list[tuple[int, int, bool]]:
        """Split tokens `[begin, end)` at residency changes: (begin, end, is_resident)."""
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
        """Absent tokens before the last resident chunk: position minus row index of what is written
        next.
        """
        return (self._chunks[-1] + 1 - len(self._chunks)) * CHUNK_TOKENS if self._chunks else 0

    def put(self, chunk: int, page: int) -> None:
        """Place the chunk in `page`."""
        at = bisect_left(self._chunks, chunk)
        if at == len(self._chunks) or self._chunks[at] != chunk:
            self._chunks.insert(at, chunk)
            self._pages.insert(at, page)
        self._pages[at] = page
        self._count_from(at)

    def drop(self, chunk: int) -> None:
        """Remove the chunk."""
        at = self._index(chunk)
        del self._chunks[at], self._pages[at]
        self._count_from(at)

    def clear(self) -> None:
        """Remove all chunks."""
        self._chunks.clear()
        self._pages.clear()
        self._num_in_order = 0

    def row_index(self, token: int) -> int:
        """The row index of `token`; at a chunk border, the number of resident rows before it."""
        chunk, rest = divmod(token, CHUNK_TOKENS)
        at = bisect_left(self._chunks, chunk) if rest == 0 else self._index(chunk)
        return at * CHUNK_TOKENS + rest

    def is_in_order(self, row_index: int) -> bool:
        """Whether rows `[0, row_index)` are contiguous."""
        return row_index <= self._num_in_order * CHUNK_TOKENS

    def runs(self, begin: int, end: int) -> list[range]:
        """Places of row indices `[begin, end)`, in order, as few ranges as possible."""
        assert end <= len(self._pages) * CHUNK_TOKENS, f"no page for row {end - 1} in {self}"
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
        assert self._chunks[at : at + 1] == [chunk], f"chunk {chunk} is not resident: {self}"
        return at

    def _count_from(self, changed: int) -> None:
        """Recount the pages in order after a change at index `changed`."""
        at = min(self._num_in_order, changed)
        while at < len(self._pages) and self._pages[at] == at:
            at += 1
        self._num_in_order = at
