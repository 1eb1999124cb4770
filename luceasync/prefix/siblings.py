"""The nodes that continue one parent, found by their tokens.

Knows keys and tokens alone; the tree owns the nodes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from luceasync.node_words import NodeKey
from luceasync.prefix.node import common_prefix


class Siblings:
    """The nodes that continue one parent, sorted by their tokens: the one that shares most with a
    prompt then stands beside the place where the prompt would stand. Finding it takes a few
    comparisons, however many prompts start with the same words.
    """

    __slots__ = ("_spans", "keys", "longest")

    def __init__(self) -> None:
        self._spans: list[array[int]] = []
        self.keys: list[NodeKey] = []
        self.longest = 0

    def add(self, span: array[int], key: NodeKey) -> None:
        """Raises ValueError where the tokens are here under another key."""
        index = bisect_left(self._spans, span)
        if index < len(self._spans) and self._spans[index] == span:
            raise ValueError(f"node {key.hex()}: {self.keys[index].hex()} has the same tokens")
        self._spans.insert(index, span)
        self.keys.insert(index, key)
        self.longest = max(self.longest, len(span))

    def discard(self, span: array[int]) -> None:
        index = bisect_left(self._spans, span)
        del self._spans[index], self.keys[index]
        if len(span) == self.longest:
            self.longest = max(map(len, self._spans), default=0)

    def whole(self, rest: array[int]) -> list[NodeKey]:
        """Those of which every token is in `rest`, longest first."""
        keys = []
        while rest:
            index = bisect_right(self._spans, rest) - 1
            if index < 0:
                break
            shared = common_prefix(self._spans[index], rest)
            if shared == len(self._spans[index]):
                keys.append(self.keys[index])
                shared -= 1
            rest = rest[:shared]  # a whole one that is still to be found is no longer than this
        return keys

    def longest_part(
        self, rest: array[int], is_usable: Callable[[NodeKey], bool]
    ) -> tuple[NodeKey | None, int]:
        """The usable one that shares most tokens with `rest`, and how many; (None, 0) for none."""
        index = bisect_right(self._spans, rest)
        best: tuple[NodeKey | None, int] = (None, 0)
        for side in (range(index - 1, -1, -1), range(index, len(self.keys))):
            near = next((i for i in side if is_usable(self.keys[i])), None)
            shared = 0 if near is None else common_prefix(self._spans[near], rest)
            if near is not None and shared > best[1]:
                best = self.keys[near], shared
        return best
