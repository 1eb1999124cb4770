"""How much of each lane may be pinned to the devices. A value."""

from __future__ import annotations

from dataclasses import dataclass

Spans = tuple[tuple[int, int], ...]  # tokens [begin, end)


@dataclass(frozen=True, slots=True)
class PinRoom:
    """How many chunks of a lane may be pinned, besides its first one; `own` spans are, in each."""

    num_chunks: int
    own: Spans = ()
