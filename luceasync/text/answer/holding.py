"""How much of a growing text must wait for what follows.

Owns the arithmetic of ends that may become beginnings. Knows no format.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_safe(text: str, words: Sequence[str]) -> int:
    """How many characters of `text`, which holds none of `words`, cannot belong to one of them
    that is not complete yet.
    """
    longest = max(map(len, words), default=1)
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        if any(word.startswith(text[begin:]) for word in words):
            return begin
    return len(text)


def first_of(text: str, words: Sequence[str], begin: int = 0) -> tuple[int, str] | None:
    """Where the first of `words` stands in `text` from `begin` on, and which; the longest one where
    several begin there.
    """
    found = [(place, -len(word), word) for word in words if (place := text.find(word, begin)) >= 0]
    if not found:
        return None
    place, _, word = min(found)
    return place, word
