"""The ring of features, position by position: the truth of the ring and of its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scatter(
    taps: Sequence[Tensor],
    lanes: Tensor,
    begins: Tensor,
    counts: Tensor,
    paths: Tensor,
    store: Tensor,
    capacity_tokens: int,
) -> None:
    """Arguments as in features.torch_scatter; later positions overwrite."""
    for entry, lane in enumerate(lanes.tolist()):
        for j in range(int(counts[entry]) if lane >= 0 else 0):
            row = torch.cat([tap[entry, int(paths[entry, j])] for tap in taps])
            place = (int(begins[entry]) + j) % capacity_tokens
            store[lane * capacity_tokens + place] = row.to(store.dtype)


def written(lanes: Tensor, counts: Tensor, capacity_tokens: int) -> list[tuple[int, int]]:
    """Entry and number in its path of every row that stays."""
    return [
        (entry, j)
        for entry, (lane, count) in enumerate(zip(lanes.tolist(), counts.tolist(), strict=True))
        for j in range(max(count - capacity_tokens, 0), count)
        if lane >= 0
    ]


class Lane:
    """What a lane holds: position -> row, the last `capacity_tokens` of them, without a gap."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.end = 0
        self.rows: dict[int, Tensor] = {}

    def append(self, begin: int, rows: Sequence[Tensor]) -> None:
        if begin != self.end:
            self.rows.clear()
        self.end = begin
        for row in rows:
            self.rows[self.end] = row
            self.rows.pop(self.end - self.capacity_tokens, None)
            self.end += 1
