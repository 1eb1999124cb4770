"""Tap rows into the ring of features: one kernel on CUDA, its torch twin elsewhere.

Both write the same bits (of a NaN: a NaN), wait for nobody, and may be captured in a graph. They
trust what they are given; luceasync.dflash.features checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from luceasync.cuda.launch import can_launch

# (taps, lanes, begins, counts, paths, store, capacity_tokens), as torch_scatter takes them
Scatter = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor, int], None]


def choose_scatter(device: torch.device) -> Scatter:
    """The kernel where Numba can compile for `device`, else torch."""
    if device.type != "cuda" or torch.version.hip or not can_launch():
        return torch_scatter
    from luceasync.cuda.feature_ring import FeatureKernel

    return FeatureKernel(device)


def torch_scatter(
    taps: Sequence[Tensor],
    lanes: Tensor,
    begins: Tensor,
    counts: Tensor,
    paths: Tensor,
    store: Tensor,
    capacity_tokens: int,
) -> None:
    """Write row `paths[e, j]` of entry e of every tap to the place of position `begins[e] + j`.

    taps: [entries, rows, hidden] each; lanes int32 [entries] (negative: padding), begins int64
    [entries], counts int32 [entries], paths int32 [entries, max_rows], of which `counts[e]` count;
    store [num_lanes * capacity + 1, taps * hidden]: position p of lane n lies in row n * capacity +
    p % capacity. Of more rows than `capacity_tokens` only the last are written.
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
    for tap, part in zip(taps, parts, strict=True):
        part.index_copy_(0, place, tap[entry, row].flatten(0, 1).to(store.dtype))
