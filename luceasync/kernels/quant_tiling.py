"""How a product of few rows with a quantised matrix is divided among programs and warps of a GPU.

Pure; counts the shared memory of quant_gemv.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from luceasync.kernels.quant_decode import Coding, num_parts
from luceasync.kernels.quant_tiles import BLOCK_COLUMNS, BLOCK_ROWS, UNIT

WIDE, SMALL = (
    8192,
    4096,
)  # outputs at which the best split changes on the 132 multiprocessors of an H200
HUGE, FEW = 32768, 2048
LONG = 32  # units of columns
MOST_WARPS = 12  # of a program


@dataclass(frozen=True, slots=True)
class QuantSplit:
    """What a program processes: `row_blocks` of 16 weight rows (of gate and up together), whose
    columns are divided among `splits` programs of `warps` each, with `stages` of 256 columns in
    shared memory, including the current one. A program of several rows that `goes_on` takes group
    after group of row blocks: it copies the next while it adds sums. `ahead` blocks of several rows
    of x are in flight, in registers.
    """

    row_blocks: int
    warps: int
    stages: int
    splits: int = 1
    goes_on: bool = False
    ahead: int = 1


@dataclass(frozen=True, slots=True)
class QuantWork:
    """A product: `x_rows` rows of x (1, 8, 16 or 32) with a matrix [num_outputs (twice that if
    paired), num_columns] whose scales have dtype `scales`. Rows that are `is_undivided` lack the
    division by their root mean square.
    """

    coding: Coding
    scales: torch.dtype
    num_outputs: int
    num_columns: int
    x_rows: int
    paired: bool
    is_undivided: bool = False


def choose_split(work: QuantWork, most_bytes: int, *, has_clusters: bool = False) -> QuantSplit:
    """How a product is divided on a device whose programs may have `most_bytes` of shared memory,
    and may have clusters: the fastest in whole steps of 4B and 27B models on an H200
    (scripts/tune_quantised.py at 8162231), rounded to a rule. Up to 8 rows the warps that divide
    columns, and with them a row's bits, do not depend on `x_rows`.
    """
    wanted = _wanted(work, has_clusters)
    return next(
        each for each in _smaller(wanted, paired=work.paired) if shared_of(work, each) <= most_bytes
    )


def _wanted(work: QuantWork, has_clusters: bool) -> QuantSplit:
    if work.x_rows == 1:
        return _one_row(work)
    if work.x_rows <= 8:
        return _few_rows(work, has_clusters)
    if work.x_rows > 16:
        return _most_rows(work, has_clusters)
    return _many_rows(work, has_clusters)


def num_programs(work: QuantWork, split: QuantSplit, num_multiprocessors: int) -> int:
    """The number of programs: one per group of row blocks, or, if they go on, all that fit."""
    own = split.row_blocks // (2 if work.paired else 1)
    num_groups = -(-work.num_outputs // (own * BLOCK_ROWS))
    if not split.goes_on:
        return num_groups * split.splits
    num_beside = max(1, most_warps(work, split) // split.warps) * num_multiprocessors
    return min(num_groups, max(1, num_beside // split.splits)) * split.splits


def most_warps(work: QuantWork, split: QuantSplit) -> int:
    """How many warps of a multiprocessor there are to be registers for: 12 have 168 a lane."""
    if work.x_rows == 1:
        return 24
    return 8 if work.x_rows > 16 and split.row_blocks > 1 and work.coding.bits < 8 else 12


def _one_row(work: QuantWork) -> QuantSplit:
    num_units = -(-work.num_columns // (UNIT * BLOCK_COLUMNS))
    is_byte, is_long = work.coding.bits == 8, num_units >= LONG
    if work.paired or (work.num_outputs >= HUGE and num_units > 10):
        return QuantSplit(2, 4, 2)
    if work.num_outputs >= HUGE and not is_byte:
        return QuantSplit(2, 2, 4)
    if num_units <= 10:
        return QuantSplit(1, 5, 2)
    if is_byte:
        if work.num_outputs >= SMALL:
            return QuantSplit(1, 6, 3)
        return QuantSplit(1, 5, 4) if is_long else QuantSplit(2, 8, 3)
    if work.num_outputs >= WIDE:
        return QuantSplit(1, 4, 3)
    if work.num_outputs >= SMALL:
        return QuantSplit(1, 8, 3 if is_long and work.coding.bits == 4 else 2)
    return QuantSplit(1, 10, 3) if is_long else QuantSplit(1, 8, 4)


def _few_rows(work: QuantWork, has_clusters: bool) -> QuantSplit:
    """Columns are divided among as many warps as for one row."""
    one, num_units = _one_row(work), -(-work.num_columns // (UNIT * BLOCK_COLUMNS))
    if work.paired and work.coding.bits < 8:
        return replace(one, goes_on=True, ahead=2)
    if work.paired or work.num_outputs >= HUGE:
        return replace(one, stages=2, ahead=3)
    if work.coding.bits == 8 or (num_units <= 10 and work.num_outputs <= SMALL):
        return replace(one, stages=2, ahead=3)
    if has_clusters and num_units > 10 and SMALL <= work.num_outputs < WIDE:
        return QuantSplit(2, one.warps // 2, 2, splits=2, ahead=3)
    return replace(one, row_blocks=2, stages=2, ahead=3)


def _many_rows(work: QuantWork, has_clusters: bool) -> QuantSplit:
    split, coding = _many_rows_by_size(work, has_clusters), work.coding
    if coding.bits == 5 or (coding.bits == 6 and split.row_blocks == 1):
        return replace(split, ahead=3)
    if coding.bits == 4 and coding.codes == "uint" and work.paired:
        # As there are registers for, beside minimums of single groups or an offset of codes.
        if coding.zero != 0:
            return replace(split, ahead=1)
        has_plain_sums = coding.minimum == "own" and coding.has_small_minimums
        return replace(split, ahead=2, goes_on=coding.minimum == "none" or has_plain_sums)
    return replace(split, ahead=2)


def _many_rows_by_size(work: QuantWork, has_clusters: bool) -> QuantSplit:
    is_large = work.coding.bits in (5, 6)  # decoding takes more instructions
    num_units = -(-work.num_columns // (UNIT * BLOCK_COLUMNS))
    if work.paired or work.num_outputs >= HUGE:
        # The other warps wait for one that has more units.
        warps = 2 if num_units <= 16 and num_units % 4 else 4
        return QuantSplit(2, warps, 2, goes_on=work.paired)
    if work.num_outputs >= WIDE:
        # A multiprocessor runs four programs of three warps, or three of four.
        has_more = work.num_outputs // (2 * BLOCK_ROWS) > 3 * 132
        return QuantSplit(2, 3 if has_more and not is_large else 4, 2)
    if work.num_outputs <= FEW:
        return QuantSplit(1, min(MOST_WARPS, num_units), 2)
    if has_clusters and work.num_outputs < SMALL:
        return QuantSplit(1, 4, 2, splits=2)
    return QuantSplit(1, 4, 2, goes_on=True)


def _most_rows(work: QuantWork, has_clusters: bool) -> QuantSplit:
    num_units = -(-work.num_columns // (UNIT * BLOCK_COLUMNS))
    is_large, is_byte = work.coding.bits in (5, 6), work.coding.bits == 8
    if work.paired or (work.num_outputs >= HUGE and not is_large):
        warps = 2 if num_units <= 16 and num_units % 4 else 4
        has_more = work.paired and warps == 4 and not is_byte
        return QuantSplit(2, warps, 2, goes_on=has_more, ahead=1 if is_byte else 2)
    if WIDE <= work.num_outputs < HUGE and not is_byte:
        return QuantSplit(2, 4, 2, goes_on=True, ahead=2)
    if work.num_outputs <= FEW:
        return QuantSplit(1, min(MOST_WARPS, num_units), 2)
    has_halves = has_clusters and work.num_outputs < SMALL
    return QuantSplit(1, 4, 2, splits=2 if has_halves else 1)


def _smaller(split: QuantSplit, *, paired: bool) -> Iterator[QuantSplit]:
    """The split, then smaller ones for GPUs with less memory than an H200. Warps come last, since
    the bits of up to 8 rows depend on them.
    """
    yield split
    while split.stages > 2:
        yield (split := replace(split, stages=split.stages - 1))
    while split.row_blocks > 1 and not paired:
        yield (split := replace(split, row_blocks=split.row_blocks - 1))
    while split.warps > 1:
        yield (split := replace(split, warps=split.warps - 1))


def shared_of(work: QuantWork, split: QuantSplit) -> int:
    """Bytes of shared memory of a program, as quant_layout.cuh divides them."""
    coding, scale_bytes = work.coding, work.scales.itemsize
    parts: int = num_parts(coding.group)
    code_bytes = UNIT * (1024 if coding.bits == 8 else 512)
    plane_bytes = UNIT // 2 * 32 * {5: 8, 6: 16}.get(coding.bits, 0)
    each = coding.supergroup in (16, 32)
    is_alike = not each and coding.supergroup // BLOCK_COLUMNS % UNIT == 0
    num_supers = UNIT * parts if each else 1 if is_alike else UNIT
    num_chunks = UNIT * parts * ((coding.small != "none") + coding.has_small_minimums)
    num_chunks += num_supers * scale_bytes * (2 if coding.minimum == "own" else 1)
    stage_bytes = split.row_blocks * (code_bytes + plane_bytes + 16 * num_chunks)
    if work.x_rows == 1:
        stage_bytes += UNIT * BLOCK_COLUMNS * 2
    width = split.row_blocks * BLOCK_ROWS
    sum_bytes = width * 4 if work.x_rows == 1 else work.x_rows * (width + 4) * 4
    ring_bytes = split.stages * stage_bytes
    warp_bytes = ring_bytes + sum_bytes if split.goes_on else max(ring_bytes, sum_bytes)
    return split.warps * warp_bytes + squares_of(work)


def squares_of(work: QuantWork) -> int:
    """Bytes of the sums of squares of undivided rows, and of what results are multiplied by."""
    if not work.is_undivided:
        return 0
    return work.x_rows * (work.num_columns // BLOCK_ROWS * 4 + 4) + -work.x_rows * 4 % 16
