"""Every claim under way, and the nodes that must stay for it; what else is held makes room.

Knows no lanes and no tokens: which nodes a claim is about stands in the claim.
"""

from __future__ import annotations

from collections.abc import Iterator

from luceasync.keeping.claim import Claim
from luceasync.keeping.fetches import Fetches, nodes_of
from luceasync.keeping.holdings import Holdings
from luceasync.keeping.writes import Writes


class Claims:
    """The claims of all generations that wait or run."""

    def __init__(self, holdings: Holdings, fetches: Fetches, writes: Writes) -> None:
        self._holdings = holdings
        self._fetches = fetches
        self._writes = writes
        self._claims: list[Claim] = []

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims)

    def __repr__(self) -> str:
        return f"{len(self._claims)} claims"

    def add(self, claim: Claim) -> None:
        """What the claim is about stays from now on."""
        self._claims.append(claim)

    def remove(self, claim: Claim) -> None:
        """What it was about may be evicted."""
        self._claims.remove(claim)

    def waiting_for(self, key: bytes) -> list[Claim]:
        """Those that wait for the node to come from the disk."""
        return [claim for claim in self._claims if key in claim.awaited]

    def make_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` fit into memory beside what is on its way there, after evicting what
        nobody needs.
        """
        return self._holdings.make_room(num_bytes + self._fetches.num_bytes, self._in_use())

    def make_hole(self, num_bytes: int) -> bool:
        """See Holdings.make_hole."""
        return self._holdings.make_hole(num_bytes, self._in_use())

    def shrink(self) -> None:
        """Evict what is beyond the budgets and not needed."""
        self._holdings.shrink(self._in_use())

    @property
    def ends(self) -> set[bytes]:
        """Keys of the nodes that must keep what belongs to their end."""
        ends = {*self._writes.ends, *self._fetches}
        ends.update(c.match.nodes[-1].key for c in self._claims if c.match and c.match.nodes)
        return ends

    def _in_use(self) -> set[bytes]:
        """Nodes that must stay, with all that they continue."""
        keys = {*self._writes, *self._fetches}
        for claim in self._claims:
            keys.update(claim.path[-1:])
            keys.update(claim.awaited)
            if claim.match is not None:
                keys.update(node.key for node in nodes_of(claim.match))
        return {key for key in keys if key in self._holdings}
