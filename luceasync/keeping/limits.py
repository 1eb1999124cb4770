"""What the nodes that are held have to keep to: how large they may be, and which must stay.

Values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from luceasync.node_words import NodeKey


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the prefix cache. `transit_bytes` of memory may be taken beyond `memory_bytes` by
    nodes on their way to or from the disk. `disk_bytes` None: there is no disk; prefixes of fewer
    than `min_disk_tokens` tokens are not worth a file.
    """

    memory_bytes: int
    transit_bytes: int = 0
    disk_bytes: int | None = None
    min_disk_tokens: int = 1
    interval_tokens: int = 2048

    @property
    def hold_any(self) -> bool:
        """Whether there is memory for nodes at all."""
        return self.memory_bytes + self.transit_bytes > 0


@dataclass(frozen=True, slots=True)
class Needed:
    """Keys of the nodes that must stay, with all that they continue, and of those of which what
    belongs to their end must stay. `claims`: ends that go last, each of one conversation's, the one
    that was used last first.
    """

    nodes: AbstractSet[NodeKey]
    ends: AbstractSet[NodeKey]
    claims: Sequence[Sequence[NodeKey]] = ()
