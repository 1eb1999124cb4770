"""Gather the tap rows of every lane into a drafter's ring of features."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel

MAX_BLOCK_DIM = 1024  # numbers of a row per program


def gather_features(
    taps: Sequence[Tensor],
    lanes: Tensor,
    begins: Tensor,
    counts: Tensor,
    paths: Tensor,
    store: Tensor,
    capacity_tokens: int,
) -> Tensor:
    """Write row `paths[e, j]` of entry e of every tap to the place of position `begins[e] + j`, as
    luceasync.speculation.dflash.features.torch_scatter does, without asking the device.

    taps: [entries, rows, hidden] each, contiguous, of one dtype; lanes int32 [entries], negative
    for padding; begins int64 [entries]; counts int32 [entries]; paths int32 [entries, max_rows];
    store: [num_lanes * capacity + 1, taps * hidden]. Returns [entries, max_rows, taps * hidden] of
    the store's dtype; rows that were not written are undefined.
    """
    num_entries, max_rows = paths.shape
    num_rows, hidden = taps[0].shape[1:]
    written = store.new_empty(num_entries, max_rows, store.shape[1])
    # Of a longer path only the last rows stay, which the device picks.
    num_places = min(max_rows, capacity_tokens)
    block_dim = min(triton.next_power_of_2(hidden), MAX_BLOCK_DIM)
    grid = (num_places, triton.cdiv(hidden, block_dim), num_entries * len(taps))
    if 0 in grid:
        return written
    _gather_kernel[grid](
        tuple(taps),
        lanes,
        begins,
        counts,
        paths,
        store,
        written,
        capacity_tokens,
        num_rows,
        max_rows,
        HIDDEN=hidden,
        BLOCK_DIM=block_dim,
        num_warps=4,
    )
    return written


@kernel(do_not_specialize=["num_rows", "max_rows"])
def _gather_kernel(
    taps,
    lanes,
    begins,
    counts,
    paths,
    store,
    written,
    capacity,
    num_rows,
    max_rows,
    HIDDEN: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """A program writes a part of one tap's row. Its row is counted from the first that stays."""
    NUM_TAPS: tl.constexpr = len(taps)
    entry, number = tl.program_id(2) // NUM_TAPS, tl.program_id(2) % NUM_TAPS
    lane, count = tl.load(lanes + entry), tl.load(counts + entry)
    j = tl.maximum(count - capacity, 0) + tl.program_id(0)
    if (lane < 0) | (j >= count):
        return
    row = tl.load(paths + entry * max_rows + j)
    place = lane.to(tl.int64) * capacity + (tl.load(begins + entry) + j) % capacity
    dims = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    source = (entry.to(tl.int64) * num_rows + row) * HIDDEN + dims
    at = number * HIDDEN + dims
    target = entry.to(tl.int64) * max_rows + j
    for tap in tl.static_range(NUM_TAPS):
        if number == tap:
            numbers = tl.load(taps[tap] + source, mask=dims < HIDDEN)
            numbers = numbers.to(store.dtype.element_ty)
            width: tl.constexpr = NUM_TAPS * HIDDEN
            tl.store(store + place * width + at, numbers, mask=dims < HIDDEN)
            tl.store(written + target * width + at, numbers, mask=dims < HIDDEN)
