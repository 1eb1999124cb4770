"""Where nodes are cut, which of them keep their recurrent state as a path grows, and which are
evicted last.

Pure choices over nodes; the caller acts on them. Times are arguments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from luceasync.nodes import NodeKey
from luceasync.prefix_tree.node import Node, Tier

NONE: frozenset[NodeKey] = frozenset()


@dataclass(frozen=True, slots=True)
class PrefillCut:
    """A node ends at position `end`; `is_turn_end`: a turn ends there, or prompts part."""

    end: int
    is_turn_end: bool


def plan_cuts(
    begin: int,
    num_tokens: int,
    boundaries: Iterable[int],
    *,
    interval_tokens: int,
    stops: Sequence[int],
    min_tokens: int = 1,
    firm: int | None = None,
) -> list[PrefillCut]:
    """Where nodes end while tokens `[begin, num_tokens)` are run: at turn boundaries, every
    `interval_tokens` after one, and at the end of the run.

    A cut must not change any number of the run, so it can only lie in `stops`, the positions where
    the state can be saved, ascending: the chunk ends of a prefill for a recurrent family, every
    position (a `range`) for attention, whose rows stay; `num_tokens` is always one of them. A cut
    wanted elsewhere is made at the last stop before. Of two cuts closer than `min_tokens` only the
    later one is made; `firm`, a boundary that is a stop, is always cut.
    """
    assert interval_tokens >= 1 and min_tokens >= 1
    if num_tokens <= begin:
        return []
    turn_ends = {
        b if b == num_tokens else _last_stop(stops, b)
        for b in boundaries
        if begin < b <= num_tokens
    }
    ends: list[int] = []
    last = begin
    for end in _spaced(begin, {*turn_ends, num_tokens}, min_tokens, firm):
        ends += [*_intervals(last, end, interval_tokens, stops), end]
        last = end
    return [PrefillCut(end, end in turn_ends) for end in _spaced(begin, ends, min_tokens, firm)]


def _spaced(begin: int, ends: Collection[int], min_tokens: int, firm: int | None) -> list[int]:
    """The `ends` after `begin` with `min_tokens` between them, ascending. The last one is always
    among them, and so is `firm`, without displacing others.
    """
    kept: list[int] = []
    for end in sorted(ends, reverse=True):
        is_apart = not kept or (kept[-1] - end >= min_tokens and end - begin >= min_tokens)
        if is_apart and end != firm:
            kept.append(end)
    return sorted([*kept, *(end for end in ends if end == firm)])


def _intervals(begin: int, end: int, interval_tokens: int, stops: Sequence[int]) -> list[int]:
    """Stops in (begin, end): each the last within the interval or, if there is none, the next."""
    found = []
    while begin + interval_tokens < end:
        stop = _last_stop(stops, begin + interval_tokens)
        if stop <= begin:
            after = bisect_right(stops, begin)
            stop = stops[after] if after < len(stops) else end
        if stop >= end:
            break
        found.append(stop)
        begin = stop
    return found


def _last_stop(stops: Sequence[int], position: int) -> int:
    """The last of `stops` up to `position`; 0 if there is none."""
    after = bisect_right(stops, position)
    return stops[after - 1] if after else 0


def thin_states(path: Sequence[Node], keep: AbstractSet[NodeKey] = NONE) -> list[NodeKey]:
    """Keys of the nodes of `path`, a chain from the root, whose recurrent state should be dropped.

    Turn ends, the newest state and the keys in `keep` stay. Of the others the i-th, counted from 1,
    stays while it is less than 2 * (the largest power of two that divides i) from the last of them:
    one for each power. A prompt that parts from the path d of them before the last one runs fewer
    than 2 * (d + 1) again. Turn ends do not count, since they come closely after long beginnings,
    and prompts that part before them should find what they share. The result does not depend on how
    often the path was thinned while it grew.

        i            1  2  3  4  5  6  7  8  9  10  11      the last is 11
        power        1  2  1  4  1  2  1  8  1   2   1
        11 - i      10  9  8  7  6  5  4  3  2   1   0      stays if less than 2 * power
        stays                 x           x      x   x
    """
    newest = next((node.key for node in reversed(path) if node.has_state), None)
    within = [node for node in path if not node.is_turn_end]
    return [
        node.key
        for i, node in enumerate(within, 1)
        if len(within) - i >= 2 * (i & -i)
        and node.has_state
        and node.key != newest
        and node.key not in keep
    ]


def granted(
    claims: Iterable[Sequence[NodeKey]], by_key: Mapping[NodeKey, Node], tier: Tier, most_bytes: int
) -> frozenset[NodeKey]:
    """The ends of those `claims`, newest first, whose paths together take at most half of
    `most_bytes`; the newest claim is always granted. They are evicted last, and other nodes always
    have the rest."""
    ends: set[NodeKey] = set()
    counted: set[NodeKey] = set()
    num_bytes = 0
    for claim in claims:
        held = [key for key in claim if key in by_key]
        path = with_ancestors(held, by_key) - counted
        path_bytes = sum(by_key[key].bytes_in(tier) for key in path)
        if not held or (ends and 2 * (num_bytes + path_bytes) > most_bytes):
            continue
        ends.update(held)
        counted |= path
        num_bytes += path_bytes
    return frozenset(ends)


def with_ancestors(keys: Iterable[NodeKey], by_key: Mapping[NodeKey, Node]) -> set[NodeKey]:
    """These nodes and their ancestors."""
    above: set[NodeKey] = set()
    for key in keys:
        at: NodeKey | None = key
        while at is not None and at in by_key and at not in above:
            above.add(at)
            at = by_key[at].parent
    return above
