"""Products of up to 64 rows with a quantised matrix, bound by the bandwidth that reads its codes.

Codes are multiplied as they are, exact in the dtype of the rows; each group is summed in float32,
and scaled then: no weight is ever rounded. Residual and SwiGLU are fused in. A row is the same bits
whatever the other rows of its launch are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.grouped_codes import (
    Coding,
    bias_of,
    large_bytes,
    num_parts,
    numbers,
    real,
    small_number,
)
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import (
    num_multiprocessors,
    overlap_options,
    shared_bytes,
    start_next,
    wait_for_inputs,
)

MAX_ROWS = 64
BLOCK_ROWS, BLOCK_COLUMNS = 16, 64  # of a weight that lie together
SUM_BLOCK = 1024  # results that a program adds up


@dataclass(frozen=True, slots=True)
class Tiled:
    """A quantised matrix [num_rows, num_columns] in blocks of 16 x 64, [row blocks, column blocks],
    as luceasync.models.grouped.tiles lays it out. What there is none of is None.

    codes: 16-bit words [.., 256], of 8 bits [.., 2, 256]; planes: 16-bit words [.., 64] for the
    fifth bits, [.., 128] for the fifth and sixth; scales, minimums: [row blocks, super-groups, 16];
    small_scales, small_minimums: bytes [.., 16, parts], or [row blocks, groups, 16] where a group
    is wider than a block; table: float32 [16]. Of 16 rows row 8 i + g is at 2 g + i.
    """

    coding: Coding
    num_rows: int
    num_columns: int
    codes: Tensor
    scales: Tensor
    planes: Tensor | None
    small_scales: Tensor | None
    minimums: Tensor | None
    small_minimums: Tensor | None
    table: Tensor | None


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program takes at a time: `row_blocks` of 16 weight rows by `steps` x `strides` blocks
    of 64 columns. Its warps share `row_blocks` x `strides`; one of both is 1. `num_splits` programs
    divide the columns among them.
    """

    row_blocks: int
    strides: int
    steps: int
    num_splits: int
    num_warps: int
    num_stages: int
    prefetch: bool = False


def linear(
    x: Tensor,
    weight: Tiled,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    chosen: Tile | None = None,
) -> Tensor:
    """x @ weight^T (+ residual).

    x: [rows <= MAX_ROWS, columns], bfloat16; residual: [rows, outputs]. Returns [rows, outputs] in
    `dtype`, that of x unless it is named. `chosen` replaces `tile`.
    """
    out = x.new_empty(x.shape[0], weight.num_rows, dtype=dtype)
    return _product(x, weight, residual, out, chosen, paired=False)


def swiglu(x: Tensor, gate_up: Tiled, *, chosen: Tile | None = None) -> Tensor:
    """silu(gate) * up. x: [rows, columns]; gate_up: [2 * inner, columns], gate first, inner a
    multiple of 16. -> [rows, inner].
    """
    out = x.new_empty(x.shape[0], gate_up.num_rows // 2)
    return _product(x, gate_up, None, out, chosen, paired=True)


def _product(
    x: Tensor,
    weight: Tiled,
    residual: Tensor | None,
    out: Tensor,
    chosen: Tile | None,
    *,
    paired: bool,
) -> Tensor:
    num_rows = x.shape[0]
    assert num_rows <= MAX_ROWS, "few rows"
    num_outputs = weight.num_rows // (2 if paired else 1)
    padded_rows = padded(num_rows, x.is_cuda and torch.version.hip is None)
    chosen = chosen or tile(
        weight.coding,
        num_outputs,
        weight.num_columns,
        padded_rows,
        paired=paired,
        shared_bytes=shared_bytes(x),
        num_multiprocessors=num_multiprocessors(x),
    )
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    if chosen.num_splits == 1:
        _launch(x, weight, residual, out, chosen, padded_rows, paired=paired)
        return out
    width = num_outputs * (2 if paired else 1)
    parts = out.new_empty(chosen.num_splits, num_rows, width, dtype=torch.float32)
    _launch(x, weight, None, parts, chosen, padded_rows, paired=paired)
    _sum_parts_kernel[(triton.cdiv(num_outputs, SUM_BLOCK), num_rows)](
        parts,
        residual,
        out,
        num_outputs,
        width,
        PAIRED=paired,
        NUM_PARTS=chosen.num_splits,
        BLOCK=SUM_BLOCK,
        num_warps=4,
        **overlap_options(x),
    )
    return out


def padded(num_rows: int, has_small_tiles: bool) -> int:
    """Rows of a launch of `num_rows`; NVIDIA's tensor cores take 8 at a time, others 16."""
    return max(8 if has_small_tiles else 16, int(triton.next_power_of_2(num_rows)))


def tile(
    coding: Coding,
    num_outputs: int,
    num_columns: int,
    padded_rows: int,
    *,
    paired: bool,
    shared_bytes: int,
    num_multiprocessors: int,
) -> Tile:
    """The tile for a weight of `num_outputs` rows (twice that if paired). Measured on an H200."""
    num_row_blocks = num_outputs // BLOCK_ROWS
    if padded_rows <= 8:
        return Tile(1, 4, 4, 1, 4, 3, prefetch=True)
    num_programs = triton.cdiv(num_row_blocks, 8)
    num_steps = num_columns // (2 * BLOCK_COLUMNS)
    num_splits = max(1, min(2 * num_multiprocessors // num_programs, num_steps // 8, 8))
    return Tile(8, 1, 2, num_splits, 8, 4 if padded_rows <= 16 else 2, prefetch=True)


def _launch(
    x: Tensor,
    weight: Tiled,
    residual: Tensor | None,
    out: Tensor,
    chosen: Tile,
    padded_rows: int,
    *,
    paired: bool,
) -> None:
    """out: [rows, outputs], or float32 [splits, rows, outputs (twice that if paired)]."""
    num_rows = x.shape[0]
    num_outputs = weight.num_rows // (2 if paired else 1)
    num_row_blocks = num_outputs // BLOCK_ROWS
    num_blocks = weight.num_columns // BLOCK_COLUMNS
    step = chosen.steps * chosen.strides
    supergroup = weight.coding.supergroup or weight.num_columns
    group = weight.coding.group or weight.num_columns
    _grouped_rows_kernel[(triton.cdiv(num_row_blocks, chosen.row_blocks), chosen.num_splits)](
        x,
        weight.codes,
        weight.planes,
        weight.scales,
        weight.small_scales,
        weight.minimums,
        weight.small_minimums,
        weight.table,
        residual,
        out,
        num_rows,
        num_row_blocks,
        num_blocks,
        -(-weight.num_columns // supergroup),
        -(-weight.num_columns // group),
        PAIRED=paired,
        EVEN=num_blocks % (step * chosen.num_splits) == 0,
        ROWS=padded_rows,
        ROW_BLOCKS=chosen.row_blocks,
        STRIDES=chosen.strides,
        STEPS=chosen.steps,
        SPLIT=chosen.num_splits > 1,
        STAGES=chosen.num_stages,
        PREFETCH=chosen.prefetch and x.is_cuda and torch.version.hip is None,
        ASM=x.is_cuda and torch.version.hip is None and x.dtype == torch.bfloat16,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **weight.coding.constants,
        **overlap_options(x),
    )


@triton.jit
def _times(supers, words, PART: tl.constexpr, SMALL: tl.constexpr, ASM: tl.constexpr):
    """supers * a small number, rounded once; words: 8, 16 or 32 bits for the parts of a block."""
    if ASM and SMALL == "uint8":
        # The sum is exact before it is rounded, where a fused product is one.
        large = large_bytes(words, PART, ASM)
        return tl.fma(large, supers, supers * -8388608.0)
    else:
        return supers * small_number(words, PART, SMALL)


@triton.jit
def _of_rows(scale, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCKS, row, columns by 2, row by 8] -> [BLOCKS, 16, ROWS]: all columns are alike."""
    each = tl.permute(scale, (0, 3, 1, 2))
    each = tl.broadcast_to(each[:, :, :, None, :, None], [BLOCKS, 2, 8, ROWS // 8, 4, 2])
    return tl.reshape(each, [BLOCKS, 16, ROWS])


@triton.jit
def _wide_place(offset, at, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Which stretch of WIDTH columns, 0 for all, has block `at` + offset; STEP divides `at`."""
    if WIDTH == 0:
        return offset * 0
    elif WIDTH <= 64:
        return (at + offset) * (64 // WIDTH)
    elif STEP % (WIDTH // 64) == 0:
        return at // (WIDTH // 64) + offset // (WIDTH // 64)
    else:
        return (at + offset) // (WIDTH // 64)


@triton.jit
def _multiplied(
    total,
    columns,
    sums,
    row_block,
    offset,
    at,
    ok,
    codes,
    planes,
    scales,
    small_scales,
    minimums,
    small_minimums,
    table,
    num_blocks,
    num_supergroups,
    num_groups,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    SUPERGROUP: tl.constexpr,
    E8M0: tl.constexpr,
    SMALL: tl.constexpr,
    MINIMUM: tl.constexpr,
    SMALL_MINIMUMS: tl.constexpr,
    DIVIDES: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """total + the products of blocks `at` + offset. row_block, offset, ok: [BLOCKS]; columns: for
    each 16 columns x of the blocks, [BLOCKS, 16, rows]; sums: for each part of a block theirs,
    [BLOCKS, 16, rows].
    """
    PARTS: tl.constexpr = num_parts(GROUP)
    ROWS: tl.constexpr = total.shape[2]
    FOLD: tl.constexpr = MINIMUM != "none"
    BIAS: tl.constexpr = bias_of(BITS, CODES, ZERO, FOLD)
    first_block = row_block.to(tl.int64) * num_blocks + offset  # [BLOCKS]
    mask = None if EVEN else ok[:, None]
    small_mask = None if EVEN else ok[:, None, None, None]
    # Blocks past the end have scales of 0: whatever their codes are adds nothing.
    none = None if EVEN else 0
    WORDS: tl.constexpr = 512 if BITS == 8 else 256  # of a block
    words_at = codes + first_block[:, None] * WORDS + tl.arange(0, 256)[None, :] + at * WORDS
    words = tl.load(words_at, mask=mask)
    other_words = words
    if BITS == 8:
        other_words = tl.load(words_at + 256, mask=mask)
    high = None
    if BITS == 5 or BITS == 6:
        EACH_LANE: tl.constexpr = 2 if BITS == 5 else 4
        lane = tl.arange(0, 8)[:, None, None] * 4 + tl.arange(0, 4)[None, :, None]
        lane_word = (lane * EACH_LANE + tl.arange(0, EACH_LANE)[None, None, :])[None]
        high_at = planes + first_block[:, None, None, None] * (32 * EACH_LANE) + lane_word
        high = tl.load(high_at + at * (32 * EACH_LANE), mask=small_mask)
    # A lane of NVIDIA's has rows g and 8 + g of a product, g = lane / 4: it loads their scales.
    n = tl.arange(0, 8)[None, :, None, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    n += tl.zeros([1, 8, 4, 2], tl.int32)
    if SMALL != "none" or SMALL_MINIMUMS:
        if PARTS > 1:
            small_place = first_block * 16
            small_at = at * 16
        else:
            groups_before = row_block.to(tl.int64) * num_groups
            small_place = (groups_before + _wide_place(offset, at, GROUP, STEP)) * 16
            small_at = 0
        small_place = small_place[:, None, None, None] + n
    if SMALL != "none":
        small_words = tl.load(small_scales + small_place + small_at, mask=small_mask, other=none)
    if SMALL_MINIMUMS:
        small_minimum_words = tl.load(
            small_minimums + small_place + small_at, mask=small_mask, other=none
        )
    supers_before = row_block.to(tl.int64) * num_supergroups
    EACH: tl.constexpr = SUPERGROUP == 16 or SUPERGROUP == 32  # as many as groups
    for part in tl.static_range(PARTS):
        if part == 0 or EACH:
            supergroup = supers_before + _wide_place(offset, at, SUPERGROUP, STEP)
            supergroup += part
            super_place = supergroup[:, None, None, None] * 16 + n
            stored = tl.load(scales + super_place, mask=small_mask, other=none)
            supers = real(stored, E8M0)
            if not EVEN:
                supers = tl.where(small_mask, supers, 0.0)
            super_minimums = supers
            if MINIMUM == "own":
                stored = tl.load(minimums + super_place, mask=small_mask, other=none)
                super_minimums = real(stored, E8M0)
        product = tl.zeros(total.shape, tl.float32)
        for quarter in tl.static_range(part * 4 // PARTS, (part + 1) * 4 // PARTS):
            w = numbers(
                other_words if quarter >= 2 else words,
                high,
                table,
                BLOCKS,
                BITS,
                CODES,
                ZERO,
                TABLE,
                quarter,
                FOLD,
                ASM,
                columns[0].dtype,
            )
            product = tl.dot(w, columns[quarter], product)
        scale = supers
        if SMALL != "none":
            if DIVIDES:
                scale = small_number(small_words, part, SMALL) / supers
                if not EVEN:
                    scale = tl.where(small_mask, scale, 0.0)
            else:
                scale = _times(supers, small_words, part, SMALL, ASM)
        total += product * _of_rows(scale, BLOCKS, ROWS)
        if MINIMUM != "none":
            minimum = super_minimums
            if SMALL_MINIMUMS:
                minimum = _times(super_minimums, small_minimum_words, part, "uint8", ASM)
            minimum += scale * BIAS
            total -= sums[part] * _of_rows(minimum, BLOCKS, ROWS)
    return total


@triton.jit
def _columns(
    pointers,
    ok,
    STEPS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    STRIDES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """16 columns of each block, [STEPS * STRIDES, 16, ROWS], for all rows: [blocks, 16, ROWS]."""
    loaded = tl.load(pointers, mask=ok, other=0.0)
    if ROW_BLOCKS > 1:
        loaded = tl.reshape(loaded, [STEPS, 1, STRIDES, 16, ROWS])
        loaded = tl.broadcast_to(loaded, [STEPS, ROW_BLOCKS, STRIDES, 16, ROWS])
        loaded = tl.reshape(loaded, [STEPS * ROW_BLOCKS * STRIDES, 16, ROWS])
    return loaded


@triton.jit
def _sums(ones, columns, PARTS: tl.constexpr):
    """Of the columns of each part, in every row of a product: a tensor core's are where they are
    wanted.
    """
    none = tl.zeros([ones.shape[0], 16, columns[0].shape[2]], tl.float32)
    first = tl.dot(ones, columns[0], none)
    if PARTS == 4:
        return (
            first,
            tl.dot(ones, columns[1], none),
            tl.dot(ones, columns[2], none),
            tl.dot(ones, columns[3], none),
        )
    elif PARTS == 2:
        first = tl.dot(ones, columns[1], first)
        return first, tl.dot(ones, columns[3], tl.dot(ones, columns[2], none))
    else:
        first = tl.dot(ones, columns[2], tl.dot(ones, columns[1], first))
        return (tl.dot(ones, columns[3], first),)


@triton.jit
def _prefetch(pointers):
    """Ask for the lines that have these bytes; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@kernel(
    do_not_specialize=[
        "num_rows",
        "num_row_blocks",
        "num_blocks",
        "num_supergroups",
        "num_groups",
    ]
)
def _grouped_rows_kernel(
    x,
    codes,
    planes,
    scales,
    small_scales,
    minimums,
    small_minimums,
    table,
    residual,
    out,
    num_rows,
    num_row_blocks,
    num_blocks,
    num_supergroups,
    num_groups,
    PAIRED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    STRIDES: tl.constexpr,
    STEPS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    ASM: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    SUPERGROUP: tl.constexpr,
    E8M0: tl.constexpr,
    SMALL: tl.constexpr,
    MINIMUM: tl.constexpr,
    SMALL_MINIMUMS: tl.constexpr,
    DIVIDES: tl.constexpr,
    TABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PARTS: tl.constexpr = num_parts(GROUP)
    UNITS: tl.constexpr = ROW_BLOCKS * STRIDES  # of a step, which warps share
    BLOCKS: tl.constexpr = STEPS * UNITS
    STEP: tl.constexpr = STEPS * STRIDES
    DTYPE: tl.constexpr = x.dtype.element_ty
    split = tl.program_id(1)
    batch = tl.arange(0, BLOCKS)  # [step, row block, stride]
    own = tl.program_id(0) * ROW_BLOCKS + batch // STRIDES % ROW_BLOCKS
    row_block = tl.minimum(own, num_row_blocks - 1)
    # Blocks that follow each other in memory are one warp's.
    offset = batch % STRIDES * STEPS + batch // UNITS
    width = tl.cdiv(tl.cdiv(num_blocks, STEP), tl.num_programs(1)) * STEP
    begin = split * width
    end = tl.minimum(begin + width, num_blocks)
    if PREFETCH:
        LINES: tl.constexpr = 8 if BITS == 8 else 4  # of a block of codes
        line = tl.arange(0, 128)
        for row in tl.static_range(ROW_BLOCKS):
            at_row = tl.minimum(tl.program_id(0) * ROW_BLOCKS + row, num_row_blocks - 1)
            first = codes + (at_row.to(tl.int64) * num_blocks + begin) * (LINES * 64)
            for at in range(0, (end - begin) * LINES, 128):
                _prefetch(first + tl.minimum(at + line, (end - begin) * LINES - 1) * 64)
                if PAIRED:
                    up = first + num_row_blocks.to(tl.int64) * num_blocks * (LINES * 64)
                    _prefetch(up + tl.minimum(at + line, (end - begin) * LINES - 1) * 64)

    m = tl.arange(0, ROWS)
    m_ok = m < num_rows
    k = tl.arange(0, 16)
    column_batch = tl.arange(0, STEP)  # [step, stride]
    column_offset = column_batch % STRIDES * STEPS + column_batch // STRIDES
    dim = num_blocks * 64
    rows_at = x + m[None, None, :] * dim + (column_offset * 64)[:, None, None] + k[None, :, None]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)

    total = tl.zeros([BLOCKS, 16, ROWS], tl.float32)  # the weight is the left operand
    other = tl.zeros([BLOCKS, 16, ROWS], tl.float32)
    ones = tl.full([BLOCKS, 16, 16], 1.0, DTYPE)
    for at in tl.range(begin, end, STEP, num_stages=STAGES):
        ok = at + offset < end
        columns_ok = m_ok[None, None, :]
        if not EVEN:
            columns_ok = columns_ok & (at + column_offset < end)[:, None, None]
        here = rows_at + at * 64
        columns = (
            _columns(here, columns_ok, STEPS, ROW_BLOCKS, STRIDES, ROWS),
            _columns(here + 16, columns_ok, STEPS, ROW_BLOCKS, STRIDES, ROWS),
            _columns(here + 32, columns_ok, STEPS, ROW_BLOCKS, STRIDES, ROWS),
            _columns(here + 48, columns_ok, STEPS, ROW_BLOCKS, STRIDES, ROWS),
        )
        sums = None
        if MINIMUM != "none":
            sums = _sums(ones, columns, PARTS)
        total = _multiplied(
            total,
            columns,
            sums,
            row_block,
            offset,
            at,
            ok,
            codes,
            planes,
            scales,
            small_scales,
            minimums,
            small_minimums,
            table,
            num_blocks,
            num_supergroups,
            num_groups,
            BLOCKS,
            STEP,
            EVEN,
            BITS,
            CODES,
            ZERO,
            GROUP,
            SUPERGROUP,
            E8M0,
            SMALL,
            MINIMUM,
            SMALL_MINIMUMS,
            DIVIDES,
            TABLE,
            ASM,
        )
        if PAIRED:
            other = _multiplied(
                other,
                columns,
                sums,
                row_block + num_row_blocks,
                offset,
                at,
                ok,
                codes,
                planes,
                scales,
                small_scales,
                minimums,
                small_minimums,
                table,
                num_blocks,
                num_supergroups,
                num_groups,
                BLOCKS,
                STEP,
                EVEN,
                BITS,
                CODES,
                ZERO,
                GROUP,
                SUPERGROUP,
                E8M0,
                SMALL,
                MINIMUM,
                SMALL_MINIMUMS,
                DIVIDES,
                TABLE,
                ASM,
            )

    num_outputs = num_row_blocks * 16
    n = tl.program_id(0) * ROW_BLOCKS * 16 + tl.arange(0, ROW_BLOCKS * 16)
    ok = m_ok[None, :] & (n < num_outputs)[:, None]
    result = _summed(total, STEPS, ROW_BLOCKS, STRIDES, ROWS)
    if PAIRED:
        second = _summed(other, STEPS, ROW_BLOCKS, STRIDES, ROWS)
    if SPLIT:
        width = num_outputs * (2 if PAIRED else 1)
        place = (split.to(tl.int64) * num_rows + m[None, :]) * width + n[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=ok)
        if PAIRED:
            tl.store(out + place + num_outputs, second.to(out.dtype.element_ty), mask=ok)
    else:
        place = m[None, :] * num_outputs + n[:, None]
        if PAIRED:
            result = result * tl.sigmoid(result) * second
        if residual is not None:
            result += tl.load(residual + place, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _summed(
    total,
    STEPS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    STRIDES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """[blocks, 16, rows] -> [row blocks * 16, rows]."""
    split = tl.reshape(total, [STEPS, ROW_BLOCKS, STRIDES, 16, ROWS])
    return tl.reshape(tl.sum(tl.sum(split, 2), 0), [ROW_BLOCKS * 16, ROWS])


@kernel()
def _sum_parts_kernel(
    parts,
    residual,
    out,
    num_outputs,
    width,
    PAIRED: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = n < num_outputs
    wait_for_inputs(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    other = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        at = parts + (part * tl.num_programs(1) + row).to(tl.int64) * width + n
        total += tl.load(at, mask=ok, other=0.0)
        if PAIRED:
            other += tl.load(at + num_outputs, mask=ok, other=0.0)
    if PAIRED:
        total = total * tl.sigmoid(total) * other
    if residual is not None:
        total += tl.load(residual + row * num_outputs + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + n, total.to(out.dtype.element_ty), mask=ok)
