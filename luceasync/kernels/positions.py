"""Small kernels that turn the positions of a pass into rotations and row indices, before the first
layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

BLOCK = 256  # numbers per program


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of positions * frequencies.

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
    _ranks_kernel[(triton.cdiv(found.numel(), BLOCK),)](
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


@kernel()
def _rotation_kernel(
    positions,
    frequencies,
    cos,
    sin,
    num_numbers,
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
    tl.store(cos + at, tl.cos(angle), mask=ok)
    tl.store(sin + at, tl.sin(angle), mask=ok)


@kernel(do_not_specialize=["num_numbers", "last", "num_rows"])
def _ranks_kernel(
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
