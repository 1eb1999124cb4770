"""Where the chunks of a prefill end. Pure: positions in, positions out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from luceasync.kv.pages import CHUNK_TOKENS

MIN_LAST_TOKENS = 16  # of the last chunk of a prompt
MAX_OPENER_TOKENS = CHUNK_TOKENS  # more than that is a turn that the answer goes on with


def opener_of(boundaries: Sequence[int], num_tokens: int) -> int | None:
    """Where that begins which opens the answer: the last turn's end, shortly before the prompt's.
    None where there is no such place, or too little before it to be kept.
    """
    last = boundaries[-1] if boundaries else 0
    is_near = 0 < num_tokens - last <= MAX_OPENER_TOKENS
    return last if is_near and last >= CHUNK_TOKENS else None


def split_points(boundaries: Sequence[int], num_tokens: int, chunk_tokens: int) -> tuple[int, ...]:
    """Turn boundaries at which chunks of a prefill end besides the multiples of `chunk_tokens`.

    The first is most often where other conversations part from this one; the others leave a quarter
    of a chunk to each other, so that many short turns cost few more passes. What opens the answer
    is run with what is before it: the state between them is taken within the chunk. Chunks follow
    from the prompt alone: a run has the same, whatever is kept or found of it. (The one split that
    does not is made where a prompt parts from another one: see luceasync.keeping.forks.)
    """
    points: list[int] = []
    opener = opener_of(boundaries, num_tokens)
    for boundary in boundaries:
        before = boundary - points[-1] if points else boundary
        least = max(CHUNK_TOKENS, chunk_tokens // 4) if points else CHUNK_TOKENS
        is_apart = before >= least and num_tokens - boundary >= MIN_LAST_TOKENS
        if is_apart and boundary != opener:
            points.append(boundary)
    return tuple(points)


def chunk_end(begin: int, num_tokens: int, chunk_tokens: int, splits: Sequence[int] = ()) -> int:
    """Where the prefill chunk that starts at `begin` ends: at a multiple of `chunk_tokens`, at a
    split, or with the prompt.

    Cuts lie at fixed positions, so that the numbers of a run do not depend on what else is running.
    """
    end = min(num_tokens, (begin // chunk_tokens + 1) * chunk_tokens)
    after = bisect_right(splits, begin)
    return min(end, splits[after]) if after < len(splits) else end


def chunk_ends(
    begin: int, num_tokens: int, chunk_tokens: int, splits: Sequence[int] = ()
) -> list[int]:
    """Where all chunks of a prefill from `begin` on end."""
    ends = []
    while begin < num_tokens:
        begin = chunk_end(begin, num_tokens, chunk_tokens, splits)
        ends.append(begin)
    return ends
