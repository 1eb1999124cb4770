"""What all layers of a drafter share about the rows of a pass, in one kernel: positions, rotation,
and how far each ring of context is filled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

BLOCK_ROWS = 16  # rows of an entry per program


@dataclass(frozen=True, slots=True)
class DraftRowTensors:
    """Rows of a pass: `lanes` int32 [entries], negative = padding; `positions` int32 [entries,
    rows]; `spans` int32 [rings, entries, rows]: how many places of a ring hold context before the
    first row of an entry; `rotation`: cos, sin float32 [entries, rows, half].
    """

    lanes: Tensor
    positions: Tensor
    spans: Tensor
    rotation: tuple[Tensor, Tensor]


def draft_rows(
    lanes: Tensor, begins: Tensor, num_rows: int, inverse: Tensor, capacities: Tensor
) -> DraftRowTensors:
    """Describe rows at positions `[begins, begins + num_rows)` of `lanes`, both int32 or int64
    [entries].

    inverse: float32 [half], the angle of one position; capacities: int32 [rings].
    """
    num_entries, num_rings, half = len(lanes), len(capacities), len(inverse)
    shape = (num_entries, num_rows)
    index = torch.int32
    rows = DraftRowTensors(
        inverse.new_empty(num_entries, dtype=index),
        inverse.new_empty(shape, dtype=index),
        inverse.new_empty(num_rings, *shape, dtype=index),
        (inverse.new_empty(*shape, half), inverse.new_empty(*shape, half)),
    )
    _draft_rows_kernel[(triton.cdiv(num_rows, BLOCK_ROWS), num_entries)](
        lanes,
        begins,
        inverse,
        capacities,
        rows.lanes,
        rows.positions,
        rows.spans,
        *rows.rotation,
        num_rows,
        num_entries * num_rows,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        NUM_RINGS=num_rings,
        BLOCK_ROWS=BLOCK_ROWS,
        num_warps=4,
        **overlap_options(inverse),
    )
    return rows


# The alignment of the first two depends on the number of entries: compile one kernel for all, and
# for every number of rows.
@kernel(
    do_not_specialize=["num_rows", "num_all_rows"],
    do_not_specialize_on_alignment=["lanes", "begins"],
)
def _draft_rows_kernel(
    lanes,
    begins,
    inverse,
    capacities,
    out_lanes,
    positions,
    spans,
    cos,
    sin,
    num_rows,
    num_all_rows,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NUM_RINGS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    entry = tl.program_id(1)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    tl.store(out_lanes + entry, tl.load(lanes + entry).to(tl.int32))
    begin = tl.load(begins + entry).to(tl.int32)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_ok = row < num_rows
    at = entry * num_rows + row
    tl.store(positions + at, begin + row, mask=row_ok)
    for ring in tl.static_range(NUM_RINGS):
        span = tl.minimum(begin, tl.load(capacities + ring)) + tl.zeros_like(row)
        tl.store(spans + ring * num_all_rows + at, span, mask=row_ok)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    angle = (begin + row).to(tl.float32)[:, None] * tl.load(inverse + i, mask=i < HALF, other=0.0)
    ok = row_ok[:, None] & (i < HALF)
    at_angle = at.to(tl.int64)[:, None] * HALF + i
    tl.store(cos + at_angle, tl.cos(angle), mask=ok)
    tl.store(sin + at_angle, tl.sin(angle), mask=ok)
