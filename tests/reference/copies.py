"""The slow truth of luceasync.cyext.copies: every place of the text is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GRAMS = (8, 4, 2)
MAX_LENGTH = 64
GAP = -1


class SlowCopies:
    """See luceasync.cyext.copies.CopyIndex."""

    def __init__(self, ends: Iterable[int] = (), num_tried: int = 16) -> None:
        self._ends = frozenset(ends)
        self._num_tried = num_tried
        self._ids: list[int] = []
        self._place: int | None = None
        self._length = 0

    def put_before(self, tokens: Sequence[int]) -> None:
        self._ids += [*tokens, GAP]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._place is not None and self._ids[self._place] == token:
                self._place, self._length = self._place + 1, min(self._length + 1, MAX_LENGTH)
            else:
                self._place, self._length = None, 0
            self._ids.append(token)

    def find(self) -> tuple[int, int]:
        """The longest match of the text's end among the newest places that share its last 8
        tokens; if there is none, its last 4, then 2. The place that the last match goes on to
        counts, too.
        """
        end = len(self._ids)
        best = (-1, 0)
        for gram in GRAMS:
            places = [p for p in range(end - 1, 0, -1) if self._length_at(p) >= gram]
            for place in places[: self._num_tried]:
                if self._length_at(place) > best[1]:
                    best = place, self._length_at(place)
            if best[1]:
                break
        if self._place is not None and self._length > best[1]:
            best = self._place, self._length
        self._place, self._length = best if best[1] else (None, 0)
        return best

    def _length_at(self, place: int) -> int:
        """How many tokens before `place` are those at the end."""
        ids, length = self._ids, 0
        while length < min(place, MAX_LENGTH):
            token = ids[place - 1 - length]
            if token == GAP or token != ids[-1 - length]:
                break
            length += 1
        return length

    def copied(self, place: int, num_tokens: int) -> list[int]:
        """What follows, as if it were appended token by token."""
        ids, found = [*self._ids], []
        for i in range(num_tokens):
            token = ids[place + i]
            if token == GAP:
                break
            found.append(token)
            ids.append(token)
            if token in self._ends:
                break
        return found
