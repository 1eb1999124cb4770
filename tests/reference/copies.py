"""The slow truth of luceasync.cyext.copies: every place of the text is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GRAMS = (8, 4, 2)
MAX_LENGTH = 64
LONG, SHORT, MAX_LOST = 8, 4, 16
GAP = -1


class SlowCopies:
    """See luceasync.cyext.copies.CopyIndex."""

    def __init__(self, ends: Iterable[int] = (), num_tried: int = 16) -> None:
        self._ends = frozenset(ends)
        self._num_tried = num_tried
        self._ids: list[int] = []
        self._place: int | None = None
        self._length = 0
        self._is_resumed = False
        self._lost: int | None = None  # the token that did not come
        self._since = 0  # how many have come since

    def put_before(self, tokens: Sequence[int]) -> None:
        self._ids += [*tokens, GAP]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._ids.append(token)
            if self._lost is not None:
                self._since += 1
                self._lost = self._lost if self._since <= MAX_LOST else None
            if self._place is None:
                continue
            if self._ids[self._place] == token:
                self._place, self._length = self._place + 1, min(self._length + 1, MAX_LENGTH)
                self._is_resumed &= self._length < LONG
                continue
            if self._length >= LONG or self._is_resumed:
                self._lost, self._since = self._place, 1
            self._place, self._length, self._is_resumed = None, 0, False

    def find(self) -> tuple[int, int, bool]:
        """The longest match of the text's end among the newest places that share its last 8
        tokens; if there is none, its last 4, then 2. The place that the last match goes on to
        counts, too. Without a match of four tokens, one near the place where a long one was lost
        is taken, however short.
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
        is_resumed = False
        resumed = (-1, 0) if self._lost is None else self._near(self._lost, end)
        if self._length > best[1] or (self._is_resumed and best[1] < SHORT):
            assert self._place is not None
            best, is_resumed = (self._place, self._length), self._is_resumed
        elif resumed[1] and best[1] < SHORT:
            best, is_resumed = resumed, True
        self._place, self._length = best if best[1] else (None, 0)
        self._is_resumed = is_resumed
        if best[1] >= LONG or is_resumed:
            self._lost = None
        return *best, is_resumed

    def _near(self, lost: int, end: int) -> tuple[int, int]:
        """The longest match of tokens that have come since; of equals the least shifted one."""
        places = range(lost + 1, min(lost + MAX_LOST, end - 1) + 1)
        found = [(p, min(self._length_at(p), self._since)) for p in places]
        expected = lost + self._since
        return min(found, key=lambda each: (-each[1], abs(each[0] - expected)), default=(-1, 0))

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
