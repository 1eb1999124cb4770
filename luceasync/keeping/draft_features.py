"""The draft's side of a node: which of its tokens have features, and which a prefix needs.

Owns no rows: a node's are with the drafter, wherever that is. Knows no tree and no target.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from luceasync.dflash.feature_contents import FeatureContents, Part
from luceasync.dflash.feature_node import Features, decode, encode
from luceasync.errors import SnapshotMismatch

log = logging.getLogger(__name__)

C = TypeVar("C")


class Restored(Protocol):
    """Who speculates from restored features; luceasync.dflash.decode.Speculator is one."""

    def restored(self, lane: int, end: int, *, with_features: bool) -> None: ...


class Held(NamedTuple, Generic[C]):
    """Rows of positions `span`."""

    span: range
    content: C


class DraftFeatures(Generic[C]):
    """See luceasync.keeping.memory_nodes.Features."""

    def __init__(self, contents: FeatureContents[C], speculator: Restored) -> None:
        self._contents = contents
        self._speculator = speculator

    @property
    def num_tokens(self) -> int:
        return self._contents.capacity_tokens

    def num_bytes(self, num_tokens: int) -> int:
        return min(num_tokens, self._contents.capacity_tokens) * self._contents.row_bytes

    def take_out(self, lane: int, begin: int, end: int) -> Held[C] | None:
        span = self._contents.held(lane, begin, end)
        if not span:
            return None
        return Held(span, self._contents.take_out(lane, span.start, span.stop))

    def put_in(
        self, lane: int, chain: Sequence[tuple[int, Held[C] | None]], num_tokens: int
    ) -> None:
        """From the last span back, until one has none, or enough are there."""
        parts: list[Part[C]] = []
        first = num_tokens
        for begin, held in reversed(chain):
            if held is None or not self._contents.is_there(held.content):
                break
            if held.span.start >= first:  # of a part that is not taken up
                break
            parts.append(Part(held.content, 0, first - held.span.start))
            first = held.span.start
            if first > begin or num_tokens - first >= self._contents.capacity_tokens:
                break
        self._speculator.restored(lane, num_tokens, with_features=bool(parts))
        if parts:
            self._contents.put_in(lane, first, parts[::-1])

    def named(self, held: Held[C]) -> dict[str, Tensor]:
        rows = self._contents.rows(held.content)
        if rows is None:
            return {}
        return encode(self._contents.spec, Features(held.span.start, rows))

    def given(self, begin: int, end: int, tensors: Mapping[str, Tensor]) -> Held[C] | None:
        try:
            found = decode(self._contents.spec, tensors, begin=begin, end=end)
        except SnapshotMismatch as error:
            log.debug("features are left unused: %s", error)
            return None
        if found is None:
            return None
        return Held(range(found.begin, end), self._contents.given(found.rows))

    def let_go(self, held: Held[C]) -> None:
        self._contents.let_go(held.content)
