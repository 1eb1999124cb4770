"""What a backend gives a ring."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from luceasync.pipeline.backend import LayerSplitBackend


class HeardTaps:
    """A ring that keeps nothing but what it was given last; see TapRing."""

    def __init__(self, capacity_tokens: int = 1 << 20) -> None:
        self.capacity_tokens = capacity_tokens
        self.taps: list[Tensor] = []

    def absorb(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
    ) -> None:
        self.taps = list(taps)

    def absorb_chunk(self, taps: Sequence[Tensor], lane: int, begin: int, num_tokens: int) -> None:
        self.taps = list(taps)


def taps_of(backend: LayerSplitBackend, paths: Sequence[Sequence[int]] = ()) -> list[Tensor]:
    """The rows of the last pass; of stages in other processes those of `paths` alone."""
    heard = HeardTaps()
    backend.send_taps(heard, [], [], paths, 0)
    return heard.taps
