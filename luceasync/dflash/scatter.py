"""Tap rows into the ring of features: one kernel on CUDA, its torch twin elsewhere.

Both write the same bits (of a NaN: a NaN), wait for nobody, and may be captured in a graph. They
trust what they are given; luceasync.dflash.features checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from luceasync.pipeline.platform import Platform

# (taps, lanes, begins, counts, paths, store, capacity_tokens) -> rows, as torch_scatter has them
Scatter = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]


def scatter_on(platform: Platform) -> Scatter:
    """The kernel where Numba can compile for the platform, else torch."""

    def kernel() -> Scatter:
        from luceasync.cuda.feature_ring import FeatureKernel

        return FeatureKernel(platform.device)

    return platform.pick(torch=lambda: torch_scatter, numba=kernel)


def torch_scatter(
    taps: Sequence[Tensor],
    lanes: Tensor,
    begins: Tensor,
    counts: Tensor,
    paths: Tensor,
    store: Tensor,
    capacity_tokens: int,
) -> Tensor:
    """Write row `paths[e, j]` of entry e of every tap to the place of position `begins[e] + j`.

    taps: [entries, rows, hidden] each; lanes int32 [entries] (negative: padding), begins int64
    [entries], counts int32 [entries], paths int32 [entries, max_rows], of which `counts[e]` count;
    store [num_lanes * capacity + 1, taps * hidden]: position p of lane n lies in row n * capacity +
    p % capacity. Of more rows than `capacity_tokens` only the last are written. Returns the rows
    that were written, [entries, max_rows, taps * hidden] of the store's dtype; the others are
    anything.
    """
    j = torch.arange(paths.shape[1], device=store.device)
    counts = counts[:, None]
    keep = (lanes[:, None] >= 0) & (j < counts) & (j >= counts - capacity_tokens)
    place = lanes[:, None] * capacity_tokens + (begins[:, None] + j) % capacity_tokens
    # Shapes must not depend on values, so what is not kept is written too: to the row of nobody.
    place = torch.where(keep, place, store.shape[0] - 1).flatten()
    row = torch.where(keep, paths, 0).long()
    entry = torch.arange(row.shape[0], device=store.device)[:, None]
    parts = store.unflatten(1, (len(taps), -1)).unbind(1)  # [places, hidden] of each tap
    rows = [tap[entry, row].to(store.dtype) for tap in taps]
    for part, written in zip(parts, rows, strict=True):
        part.index_copy_(0, place, written.flatten(0, 1))
    return torch.cat(rows, -1)
