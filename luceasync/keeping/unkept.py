"""What memory had no room for: so that an answer can tell why no more of its prompt was found.

Owns which places these are, the newest of them. Knows no tensors and no tree.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.node_words import NodeKey

MAX_PLACES = 4096  # a quarter of a KiB each

Place = tuple[bytes, NodeKey | None]  # a tenant, and the node that would be gone on from


class Unkept:
    """The first tokens of what was refused or evicted, by place."""

    def __init__(self, max_places: int = MAX_PLACES) -> None:
        self._max_places = max_places
        self._begins: OrderedDict[Place, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, place: Place, tokens: array[int]) -> None:
        """There was no room for `tokens`, which went on from there."""
        self._begins[place] = tokens[:CHUNK_TOKENS]
        self._begins.move_to_end(place)
        if len(self._begins) > self._max_places:
            self._begins.popitem(last=False)

    def begins(self, place: Place, tokens: array[int]) -> bool:
        """Whether such tokens begin as `tokens` do, which go on from there now."""
        begin = self._begins.get(place)
        return begin is not None and tokens[: len(begin)] == begin
