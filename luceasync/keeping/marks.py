"""Where a client marks a prompt within a turn, and at which of these places a state is kept. Pure.

A place is within a chunk of the prefill, or between two: chunks end where they would without marks,
so that a mark changes no number of the run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from luceasync.kv.pages import CHUNK_TOKENS


def marked_places(
    marks: Iterable[int],
    begin: int,
    ends: Sequence[int],
    *,
    opener: int | None,
    turns: Iterable[int] = (),
    min_tokens: int,
) -> tuple[int, ...]:
    """Places of a prefill from `begin` on, whose chunks end at `ends`, that are kept for the
    `marks` shortly behind them: multiples of 64 tokens of their chunk, one in each chunk, the last.
    None in the chunk in which the state before what opens the answer is taken, the `opener`; none
    that saves fewer than `min_tokens` to who parts there: since `begin`, another place, or one of
    the `turns`, which are kept anyway.
    """
    by_chunk: dict[int, int] = {}
    for mark in sorted(marks):
        chunk = bisect_right(ends, mark)
        if chunk < len(ends) and mark > begin:
            start = ends[chunk - 1] if chunk else begin
            by_chunk[chunk] = start + (mark - start) // CHUNK_TOKENS * CHUNK_TOKENS
    places: list[int] = []
    others = sorted({begin, *turns})
    for chunk, place in by_chunk.items():
        is_between = place == (ends[chunk - 1] if chunk else begin)
        has_opener = opener is not None and bisect_right(ends, opener) == chunk
        before = max([begin, *places, *others[: bisect_right(others, place)]])
        if (is_between or not has_opener) and place - before >= min_tokens:
            places.append(place)
    return tuple(places)
