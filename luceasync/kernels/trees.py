"""The shape of proposals, computed once for each verify pass: ancestors, depths, and the inputs of
convolutions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel


def trees(parents: Tensor, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """parents: int32 [entries, rows]: negative for row 0, an earlier row for the others.

    Returns ancestors (or self) bool [entries, rows, rows], depths int32 [entries, rows] and taps
    int32 [entries, rows, reach]: places of the last `reach` inputs on the row's path, oldest
    first, in a window of `reach - 1` committed inputs followed by the rows.
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
