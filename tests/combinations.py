"""Of a test's combinations of parameters few that cover all: each value, or every two, once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Parameters = Mapping[str, Hashable]


def covering(items: Sequence[Parameters], strength: int) -> list[int]:
    """Indices of combinations in which every `strength` values that occur together in some item
    meet, by always taking the one that adds the most.
    """
    parts = [_parts(item, strength) for item in items]
    missing = set().union(*parts)
    chosen: list[int] = []
    while missing:
        best = max(range(len(items)), key=lambda i: (len(parts[i] & missing), -i))
        missing -= parts[best]
        chosen.append(best)
    return sorted(chosen)


def _parts(item: Parameters, strength: int) -> set[tuple[tuple[str, Hashable], ...]]:
    return set(combinations(sorted(item.items()), min(strength, len(item))))
