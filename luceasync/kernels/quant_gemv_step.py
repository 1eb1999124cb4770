"""One step of luceasync.kernels.quant_gemv_kernel: load blocks of a quantised matrix, and multiply.

A lane loads exactly what it feeds an NVIDIA tensor core, and the scales of the results that it
gets: this needs no shared memory, and no warp waits for another. Does not know the grid.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luceasync.kernels.quant_decode import (
    bias_of,
    large_bytes,
    num_parts,
    numbers,
    real,
    small_number,
)


@triton.jit
def nothing():
    """An empty tuple to append to."""
    return ()


@triton.jit
def _times(supers, words, PART: tl.constexpr, SMALL: tl.constexpr, ASM: tl.constexpr):
    """supers * s (or m), rounded once; words: 8, 16 or 32 bits, a byte for each part of a block."""
    if ASM and SMALL == "uint8":
        # A fused multiply-add rounds only its exact result.
        large = large_bytes(words, PART, ASM)
        return tl.fma(large, supers, supers * -8388608.0)
    else:
        return supers * small_number(words, PART, SMALL)


@triton.jit
def _of_rows(scale, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """[BLOCKS, 64] in lane order -> [BLOCKS, 16, WIDTH], the same in all columns."""
    each = tl.permute(tl.reshape(scale, [BLOCKS, 8, 4, 2]), (0, 3, 1, 2))
    each = tl.broadcast_to(each[:, :, :, :, None], [BLOCKS, 2, 8, 4, WIDTH // 4])
    return tl.reshape(each, [BLOCKS, 16, WIDTH])


@triton.jit
def _wide_place(block, WIDTH: tl.constexpr):
    """The index of the stretch of WIDTH columns (0: the whole row) that `block` begins in."""
    if WIDTH == 0:
        return block * 0
    elif WIDTH <= 64:
        return block * (64 // WIDTH)
    else:
        return block // (WIDTH // 64)


@triton.jit
def row_block_of(
    batch, STRIDES: tl.constexpr, ROW_BLOCKS: tl.constexpr, OWN: tl.constexpr, num_row_blocks
):
    """The row block at an index of a batch [.., row block, stride]; those of the second half follow
    all of the first. Row blocks past the end read the last one, and are not stored.
    """
    own = batch // STRIDES % ROW_BLOCKS
    first = tl.minimum(tl.program_id(0) * OWN + own % OWN, num_row_blocks - 1)
    return first + own // OWN * num_row_blocks


@triton.jit
def stored_of(
    row_block,
    block,
    unit_row_block,
    unit_block,
    end,
    codes,
    planes,
    scales,
    small_scales,
    minimums,
    small_minimums,
    num_blocks,
    num_supergroups,
    num_groups,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SUPERGROUP: tl.constexpr,
    SMALL: tl.constexpr,
    MINIMUM: tl.constexpr,
    SMALL_MINIMUMS: tl.constexpr,
):
    """Load the stored words of blocks, [steps * units], and of units of `STEPS` blocks of a row,
    into the registers of the lanes that need them. Blocks from `end` on have scales of 0.
    """
    PARTS: tl.constexpr = num_parts(GROUP)
    EACH: tl.constexpr = SUPERGROUP == 16 or SUPERGROUP == 32  # one per group
    ok = block < end
    before = row_block.to(tl.int64)
    place = before * num_blocks + block
    mask = ok[:, None]
    WORDS: tl.constexpr = 512 if BITS == 8 else 256  # of a block
    words_at = codes + place[:, None] * WORDS + tl.arange(0, 256)[None, :]
    found = nothing()
    found += (tl.load(words_at, mask=mask, other=0),)
    if BITS == 8:
        found += (tl.load(words_at + 256, mask=mask, other=0),)
    if BITS == 5 or BITS == 6:
        # What a lane needs of two blocks is stored together.
        EACH_LANE: tl.constexpr = 2 if BITS == 5 else 4
        e = tl.arange(0, 32 * EACH_LANE)
        word = e // EACH_LANE * (2 * EACH_LANE) + e % EACH_LANE
        first = (place // 2 * 64 + place % 2) * EACH_LANE
        found += (tl.load(planes + first[:, None] + word[None, :], mask=mask, other=0),)
    # On NVIDIA GPUs a lane has rows g and 8 + g of a product, g = lane / 4, and loads their scales.
    e = tl.arange(0, 64)
    n = (e // 8 * 2 + e % 2)[None, :]
    small_place = place * 16
    if PARTS == 1:
        small_place = (before * num_groups + _wide_place(block, GROUP)) * 16
    small_place = small_place[:, None] + n
    if SMALL != "none":
        found += (tl.load(small_scales + small_place, mask=mask, other=0),)
    if SMALL_MINIMUMS:
        found += (tl.load(small_minimums + small_place, mask=mask, other=0),)
    if SUPERGROUP == 0 or SUPERGROUP % (64 * STEPS) == 0:  # one for the whole unit
        wide = unit_row_block.to(tl.int64) * num_supergroups + _wide_place(unit_block, SUPERGROUP)
        unit_mask = (unit_block < end)[:, None]
    else:
        wide = before * num_supergroups + _wide_place(block, SUPERGROUP)
        unit_mask = mask
    super_place = wide[:, None] * 16 + n
    for part in tl.static_range(PARTS if EACH else 1):
        stored = tl.load(scales + super_place + part * 16, mask=unit_mask, other=0)
        found += (stored,)
        if MINIMUM == "own":
            stored = tl.load(minimums + super_place + part * 16, mask=unit_mask, other=0)
            found += (stored,)
    return found


@triton.jit
def multiplied(
    total,
    loaded,
    columns,
    sums,
    ok,
    STEPS: tl.constexpr,
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
    """total + the products of what `stored_of` loaded. columns: x for each 16 columns of the
    blocks, [BLOCKS, 16, rows]; sums: of x for each part of a block, [BLOCKS, 16, rows].
    """
    PARTS: tl.constexpr = num_parts(GROUP)
    TILES: tl.constexpr = len(total)
    BLOCKS: tl.constexpr = total[0].shape[0]
    WIDTH: tl.constexpr = total[0].shape[2]
    FOLD: tl.constexpr = MINIMUM != "none"
    BIAS: tl.constexpr = bias_of(BITS, CODES, ZERO, FOLD)
    EACH: tl.constexpr = SUPERGROUP == 16 or SUPERGROUP == 32
    SECOND: tl.constexpr = 1 if BITS == 8 else 0
    HIGH: tl.constexpr = 1
    AT_SMALL: tl.constexpr = 1 if BITS == 4 else 2
    AT_MINIMUM: tl.constexpr = AT_SMALL + (1 if SMALL != "none" else 0)
    AT_SUPERS: tl.constexpr = AT_MINIMUM + (1 if SMALL_MINIMUMS else 0)
    NUM_SUPERS: tl.constexpr = 2 if MINIMUM == "own" else 1
    high = None
    if BITS == 5 or BITS == 6:
        high = loaded[HIGH]
    for part in tl.static_range(PARTS):
        if part == 0 or EACH:
            supers = real(loaded[AT_SUPERS + part * NUM_SUPERS if EACH else AT_SUPERS], E8M0)
            supers = _of_steps(supers, BLOCKS)
            if E8M0 and not EVEN:  # 0 would divide to NaN
                supers = tl.where(ok[:, None], supers, 0.0)
            super_minimums = supers
            if MINIMUM == "own":
                stored = loaded[AT_SUPERS + 1 + part * NUM_SUPERS if EACH else AT_SUPERS + 1]
                super_minimums = _of_steps(real(stored, False), BLOCKS)
        scale = supers
        if SMALL != "none":
            if DIVIDES:
                scale = small_number(loaded[AT_SMALL], part, SMALL) / supers
                if not EVEN:
                    scale = tl.where(ok[:, None], scale, 0.0)
            else:
                scale = _times(supers, loaded[AT_SMALL], part, SMALL, ASM)
        if MINIMUM != "none":
            minimum = super_minimums
            if SMALL_MINIMUMS:
                minimum = _times(super_minimums, loaded[AT_MINIMUM], part, "uint8", ASM)
            minimum = _of_rows(minimum + scale * BIAS, BLOCKS, WIDTH)
        scale = _of_rows(scale, BLOCKS, WIDTH)
        weights = nothing()
        for quarter in tl.static_range(part * 4 // PARTS, (part + 1) * 4 // PARTS):
            w = numbers(
                loaded[SECOND if quarter >= 2 else 0],
                high,
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
            weights += (w,)
        added = nothing()
        for i in tl.static_range(TILES):
            product = tl.zeros([BLOCKS, 16, WIDTH], tl.float32)
            for quarter in tl.static_range(4 // PARTS):
                each = columns[(part * 4 // PARTS + quarter) * TILES + i]
                product = tl.dot(weights[quarter], each, product)
            sum = total[i] + product * scale
            if MINIMUM != "none":
                sum -= sums[part * TILES + i] * minimum
            added += (sum,)
        total = added
    return total


@triton.jit
def _of_steps(each, BLOCKS: tl.constexpr):
    """[units or blocks, 64] -> [BLOCKS, 64]: repeat what a unit has for each of its steps."""
    UNITS: tl.constexpr = each.shape[0]
    if UNITS == BLOCKS:
        return each
    else:
        wide = tl.broadcast_to(each[None], [BLOCKS // UNITS, UNITS, 64])
        return tl.reshape(wide, [BLOCKS, 64])


@triton.jit
def columns_of(
    pointers,
    ok,
    stride,
    num_rows,
    STEPS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    STRIDES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Load 16 columns of x of each block, in the order of the codes: for each WIDTH rows of x,
    [blocks, 16, WIDTH]. pointers, ok: [STEPS * STRIDES].
    """
    lane, column = tl.arange(0, 16 * WIDTH) // 4, tl.arange(0, 16 * WIDTH) % 4
    found = nothing()
    for i in tl.static_range(ROWS // WIDTH):
        row = lane // 4 + WIDTH * i
        at = pointers[:, None] + (row * stride + lane % 4 * 4 + column)[None, :]
        each = tl.load(at, mask=ok[:, None] & (row < num_rows)[None, :], other=0.0)
        # [blocks, row, pair, eight, column] -> [blocks, columns, row]
        each = tl.reshape(each, [STEPS * STRIDES, WIDTH, 4, 2, 2])
        each = tl.reshape(tl.permute(each, (0, 3, 2, 4, 1)), [STEPS, 1, STRIDES, 16, WIDTH])
        each = tl.broadcast_to(each, [STEPS, ROW_BLOCKS, STRIDES, 16, WIDTH])
        found += (tl.reshape(each, [STEPS * ROW_BLOCKS * STRIDES, 16, WIDTH]),)
    return found


@triton.jit
def sums_of(ones, columns, PARTS: tl.constexpr, TILES: tl.constexpr):
    """Sums of x over the columns of each part, for every WIDTH rows, repeated in every row of a
    product: a tensor core leaves them where they are needed.
    """
    found = nothing()
    for part in tl.static_range(PARTS):
        for i in tl.static_range(TILES):
            sum = tl.zeros([ones.shape[0], 16, columns[0].shape[2]], tl.float32)
            for quarter in tl.static_range(part * 4 // PARTS, (part + 1) * 4 // PARTS):
                sum = tl.dot(ones, columns[quarter * TILES + i], sum)
            found += (sum,)
    return found
