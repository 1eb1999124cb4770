"""Small kernels that a pass runs once, before its first layer: rotations, row indices, and the
shape of proposals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

BLOCK = 256  # numbers per program


def rotation(
    positions: Tensor, frequencies: Tensor, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of positions * frequencies, times `magnitude`.

    positions: int32 [entries, rows]; frequencies: float32 [half]. Returns float32 [entries, rows,
    half] each.
    """
    positions = positions.contiguous()
    shape = (*positions.shape, len(frequencies))
    cos, sin = (torch.empty(shape, device=positions.device) for _ in range(2))
    _rotation_kernel[(triton.cdiv(cos.numel(), BLOCK),)](
        positions,
        frequencies,
        cos,
        sin,
        cos.numel(),
        MAGNITUDE=magnitude,
        HALF=len(frequencies),
        BLOCK=BLOCK,
        num_warps=4,
        **overlap_options(positions),
    )
    return cos, sin


def row_indices(positions: Tensor, lanes: Tensor, absent: Tensor) -> Tensor:
    """The number of resident rows of the lane before each row: positions - absent[lane].

    positions: int32 [entries, rows]; lanes: int32 [entries], negative = the last of `absent`, int32
    [lanes + 1]. Returns int32 [entries, rows].
    """
    positions = positions.contiguous()
    found = torch.empty_like(positions)
    _row_indices_kernel[(triton.cdiv(found.numel(), BLOCK),)](
        positions,
        lanes,
        absent,
        found,
        found.numel(),
        len(absent) - 1,
        positions.shape[1],
        BLOCK=BLOCK,
        num_warps=1,
        **overlap_options(positions),
    )
    return found


def trees(parents: Tensor, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """The shape of proposals: ancestors, depths, and the inputs of convolutions.

    parents: int32 [entries, rows]: negative for row 0, an earlier row for the others. Returns
    ancestors (or self) bool [entries, rows, rows], depths int32 [entries, rows] and taps int32
    [entries, rows, reach]: places of the last `reach` inputs on the row's path, oldest first, in a
    window of `reach - 1` committed inputs followed by the rows.
    """
    num_entries, num_rows = parents.shape
    parents = parents.contiguous()
    ancestors = parents.new_empty(num_entries, num_rows, num_rows, dtype=torch.bool)
    depths = torch.empty_like(parents)
    taps = parents.new_empty(num_entries, num_rows, reach)
    _trees_kernel[(num_entries,)](
        parents,
        ancestors.view(torch.uint8),
        depths,
        taps,
        num_rows,
        REACH=reach,
        BLOCK=triton.next_power_of_2(num_rows),
        num_warps=4,
    )
    return ancestors, depths, taps


@kernel()
def _rotation_kernel(
    positions,
    frequencies,
    cos,
    sin,
    num_numbers,
    MAGNITUDE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_numbers
    frequency = tl.load(frequencies + at % HALF, mask=ok)
    wait_for_inputs(OVERLAP)
    angle = tl.load(positions + at // HALF, mask=ok).to(tl.float32) * frequency
    tl.store(cos + at, tl.cos(angle) * MAGNITUDE, mask=ok)
    tl.store(sin + at, tl.sin(angle) * MAGNITUDE, mask=ok)


@kernel(do_not_specialize=["num_numbers", "last", "num_rows"])
def _row_indices_kernel(
    positions,
    lanes,
    absent,
    found,
    num_numbers,
    last,
    num_rows,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_numbers
    wait_for_inputs(OVERLAP)
    lane = tl.load(lanes + at // num_rows, mask=ok, other=0)
    left = tl.load(absent + tl.where(lane < 0, last, lane), mask=ok, other=0)
    tl.store(found + at, tl.load(positions + at, mask=ok, other=0) - left, mask=ok)


@kernel()
def _trees_kernel(
    parents, ancestors, depths, taps, num_rows, REACH: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0)
    parents += entry * num_rows
    r = tl.arange(0, BLOCK)
    ok = r < num_rows
    at = tl.where(ok, r, -1)
    seen = tl.zeros([BLOCK, BLOCK], tl.int32)
    depth = tl.zeros([BLOCK], tl.int32)
    for _ in range(num_rows):  # every row climbs one step per iteration; none is deeper
        seen += (at[:, None] == r[None, :]).to(tl.int32)
        at = tl.load(parents + at, mask=at >= 0, other=-1)
        depth += (at >= 0).to(tl.int32)
    row = entry * num_rows + r
    square = row[:, None] * num_rows + r[None, :]
    tl.store(ancestors + square, (seen > 0).to(tl.uint8), mask=ok[:, None] & ok[None, :])
    tl.store(depths + row, depth, mask=ok)
    at = r
    for i in tl.static_range(REACH):
        tl.store(taps + row * REACH + (REACH - 1 - i), at + (REACH - 1), mask=ok)
        above = tl.load(parents + at, mask=ok & (at >= 0), other=0)
        at = tl.where(at >= 0, above, at - 1)
