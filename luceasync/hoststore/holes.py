"""Which parts of a range of bytes are free. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class Holes:
    """Free parts of a range of bytes: sorted, and never two that touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._begins, self._ends, strict=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that are free."""
        return sum(self._ends) - sum(self._begins)

    def take(self, num_bytes: int) -> int | None:
        """Where the first hole of that size begins; it is no longer free. None if there is none."""
        for i, (begin, end) in enumerate(self):
            if end - begin >= num_bytes:
                self._begins[i] += num_bytes
                if self._begins[i] == end:
                    del self._begins[i], self._ends[i]
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        """Make `[begin, end)` free, which was not."""
        i = bisect_left(self._begins, begin)
        assert i == 0 or self._ends[i - 1] <= begin, f"{begin} is free already"
        assert i == len(self._begins) or end <= self._begins[i], f"{end} is free already"
        joins_left = i > 0 and self._ends[i - 1] == begin
        joins_right = i < len(self._begins) and self._begins[i] == end
        if joins_right:
            end = self._ends[i]
            del self._begins[i], self._ends[i]
        if joins_left:
            self._ends[i - 1] = end
        else:
            self._begins.insert(i, begin)
            self._ends.insert(i, end)
