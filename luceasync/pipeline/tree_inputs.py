"""Static tensors that captured passes over trees of rows read: verify passes, short chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from luceasync.models.pass_rows import NO_LANE
from luceasync.models.trees import chain
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.transfer import Brief


class TreeInputs:
    """`given`: tokens int64 [size, rows] of the first shard, else [size, rows, hidden]; `parents`:
    int32 [size, rows], a chain at first. `lanes`, `begins`: int32 [size], how many tokens each lane
    has committed; `rows`: int32 [size, rows], of which the first `counts`, int32 [size], are
    accepted. These are briefs: `place` of the former two, `paths` of the latter two.
    """

    def __init__(
        self,
        size: int,
        num_rows: int,
        device: torch.device,
        activation: tuple[int, torch.dtype] | None,
    ) -> None:
        """`activation`: how wide it is, and of what; None: tokens are given."""
        self._size, self._num_rows = size, num_rows
        width, dtype = ((), torch.int64) if activation is None else (activation[:1], activation[1])
        self.given = torch.zeros((size, num_rows, *width), dtype=dtype, device=device)
        self.parents = chain(size, num_rows, device).contiguous()
        self._are_chains = True
        self.place = Brief([NO_LANE] * size + [0] * size, device)
        self.lanes, self.begins = self.place.there.view(2, size)
        self.paths = Brief([0] * (size * num_rows + size), device)
        rows, self.counts = self.paths.there.split([size * num_rows, size])
        self.rows = rows.view(size, num_rows)

    def hang(self, parents: Tensor | None) -> None:
        """Have the rows follow these, int32 [size, rows]; None: each the one before it."""
        if parents is not None:
            self.parents.copy_(parents, non_blocking=True)
        elif not self._are_chains:
            self.parents.copy_(chain(self._size, self._num_rows, self.parents.device))
        self._are_chains = parents is None

    def of_paths(self, paths: Sequence[Sequence[int]]) -> list[int]:
        """What `paths` is told: a path for each entry."""
        num_rows = self._num_rows
        filled = [row for path in paths for row in [*path, *[0] * (num_rows - len(path))]]
        return [*filled, *map(len, paths)]


def of_place(batch: Batch) -> tuple[int, ...]:
    """What `place` is told."""
    return batch.lanes + batch.begins
