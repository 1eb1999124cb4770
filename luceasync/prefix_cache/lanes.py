"""What keeping asks of lanes: what of them no node holds, and what of them is exact.

Owns the words, and the answers of lanes that hold all that they stand for. Knows no pager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from luceasync.host_cache.nodes import Span
from luceasync.nodes import NodeKey


class Lanes(Protocol):
    """Lanes of which a part may lie in nodes alone; luceasync.pipeline.paging has them."""

    @property
    def own_bytes(self) -> int:
        """Host memory that lanes take for what no node holds."""
        ...

    def kept(self, lane: int, node: NodeKey, span: Span) -> None:
        """The node holds what the span has left in the lane."""
        ...

    def exact_end(self, lane: int, end: int) -> int:
        """How many of the lane's first `end` tokens are what full attention makes of them."""
        ...

    def ledger(self, lane: int, end: int) -> Sequence[tuple[bool, float]] | None:
        """Of each chunk of the lane's first `end` tokens whether it is on the devices, and what it
        is worth, not a number where nobody knows; None where all of them are.
        """
        ...

    def expect(self, lane: int, ledger: Sequence[tuple[bool, float]]) -> None:
        """The same where the lane is to be restored to next."""
        ...


class WholeLanes:
    """Lanes that hold all that they stand for."""

    own_bytes = 0

    def kept(self, lane: int, node: NodeKey, span: Span) -> None:
        """They hold it too."""

    def exact_end(self, lane: int, end: int) -> int:
        return end

    def ledger(self, lane: int, end: int) -> None:
        return None

    def expect(self, lane: int, ledger: Sequence[tuple[bool, float]]) -> None:
        """All of it comes."""


WHOLE_LANES = WholeLanes()
