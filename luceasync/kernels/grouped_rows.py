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
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

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
    is wider than a block. Of 16 rows row 8 i + g is at 2 g + i.
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


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program takes at a time: `row_blocks` of 16 weight rows (of gate and up together) by
    `strides` stretches of columns, each a warp's, of which a step takes `steps` blocks of 64.
    `num_splits` programs divide the columns among them. `prefetch`: all codes of a program are
    asked for at once.
    """

    row_blocks: int
    strides: int
    steps: int
    num_splits: int = 1
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
) -> Tile:
    """The tile for a weight of `num_outputs` rows (twice that if paired). Measured on an H200."""
    row_blocks = 2 if paired or num_outputs >= 8192 else 1
    steps = 2 if padded_rows <= 16 and coding.bits in (4, 8) else 1
    strides = 8 if num_outputs * (2 if paired else 1) < 8192 else 4
    return Tile(row_blocks, strides, steps)


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
    own_blocks = chosen.row_blocks // 2 if paired else chosen.row_blocks
    _grouped_rows_kernel[(triton.cdiv(num_row_blocks, own_blocks), chosen.num_splits)](
        x,
        weight.codes,
        weight.planes,
        weight.scales,
        weight.small_scales,
        weight.minimums,
        weight.small_minimums,
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
        PREFETCH=chosen.prefetch and x.is_cuda and torch.version.hip is None,
        ASM=x.is_cuda and torch.version.hip is None and x.dtype == torch.bfloat16,
        num_warps=chosen.strides,
        num_stages=1,
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
def _of_rows(scale, BLOCKS: tl.constexpr):
    """[BLOCKS, 64], as lanes have them -> [BLOCKS, 16, 8]: all columns are alike."""
    each = tl.permute(tl.reshape(scale, [BLOCKS, 8, 4, 2]), (0, 3, 1, 2))
    each = tl.broadcast_to(each[:, :, :, :, None], [BLOCKS, 2, 8, 4, 2])
    return tl.reshape(each, [BLOCKS, 16, 8])


@triton.jit
def _wide_place(block, WIDTH: tl.constexpr):
    """Which stretch of WIDTH columns, 0 for all, has the first of the columns of `block`."""
    if WIDTH == 0:
        return block * 0
    elif WIDTH <= 64:
        return block * (64 // WIDTH)
    else:
        return block // (WIDTH // 64)


@triton.jit
def _row_block(
    batch, STRIDES: tl.constexpr, ROW_BLOCKS: tl.constexpr, OWN: tl.constexpr, num_row_blocks
):
    """Of a place in a batch [.., row block, stride]: the rows of a second half follow all first
    ones. Row blocks past the end read the last one instead, and nothing of them is stored.
    """
    own = batch // STRIDES % ROW_BLOCKS
    first = tl.minimum(tl.program_id(0) * OWN + own % OWN, num_row_blocks - 1)
    return first + own // OWN * num_row_blocks


@triton.jit
def _loaded(
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
    """What is stored of blocks, [steps * units], and of units, which have `STEPS` blocks of a row
    each; in registers of the lanes that want it. Blocks from `end` on have scales of 0.
    """
    PARTS: tl.constexpr = num_parts(GROUP)
    EACH: tl.constexpr = SUPERGROUP == 16 or SUPERGROUP == 32  # as many as groups
    ok = block < end
    before = row_block.to(tl.int64)
    place = before * num_blocks + block
    mask = ok[:, None]
    WORDS: tl.constexpr = 512 if BITS == 8 else 256  # of a block
    words_at = codes + place[:, None] * WORDS + tl.arange(0, 256)[None, :]
    found = (tl.load(words_at, mask=mask, other=0),)
    if BITS == 8:
        found += (tl.load(words_at + 256, mask=mask, other=0),)
    if BITS == 5 or BITS == 6:
        # Of two blocks what a lane wants of both lies together.
        EACH_LANE: tl.constexpr = 2 if BITS == 5 else 4
        e = tl.arange(0, 32 * EACH_LANE)
        word = e // EACH_LANE * (2 * EACH_LANE) + e % EACH_LANE
        first = (place // 2 * 64 + place % 2) * EACH_LANE
        found += (tl.load(planes + first[:, None] + word[None, :], mask=mask, other=0),)
    # A lane of NVIDIA's has rows g and 8 + g of a product, g = lane / 4: it loads their scales.
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
    if SUPERGROUP == 0 or SUPERGROUP % (64 * STEPS) == 0:  # all of a unit has the same
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
def _multiplied(
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
    """total + the products of what is `_loaded`. columns: for each 16 columns x of the blocks,
    [BLOCKS, 16, rows]; sums: for each part of a block theirs, [BLOCKS, 16, rows].
    """
    PARTS: tl.constexpr = num_parts(GROUP)
    TILES: tl.constexpr = len(total)
    BLOCKS: tl.constexpr = total[0].shape[0]
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
            if E8M0 and not EVEN:  # where 0 is no number
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
            minimum = _of_rows(minimum + scale * BIAS, BLOCKS)
        scale = _of_rows(scale, BLOCKS)
        weights = ()
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
        added = ()
        for i in tl.static_range(TILES):
            product = tl.zeros([BLOCKS, 16, 8], tl.float32)
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
    """[units or blocks, 64] -> [BLOCKS, 64]: what a unit has for all of its steps."""
    UNITS: tl.constexpr = each.shape[0]
    if UNITS == BLOCKS:
        return each
    else:
        wide = tl.broadcast_to(each[None], [BLOCKS // UNITS, UNITS, 64])
        return tl.reshape(wide, [BLOCKS, 64])


@triton.jit
def _columns(
    pointers,
    ok,
    stride,
    num_rows,
    STEPS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    STRIDES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """16 columns of x of each block, in the order of those of codes, for all rows of the weight: of
    every 8 rows of x [blocks, 16, 8]. pointers, ok: [STEPS * STRIDES].
    """
    lane, column = tl.arange(0, 128) // 4, tl.arange(0, 128) % 4
    found = ()
    for i in tl.static_range(ROWS // 8):
        row = lane // 4 + 8 * i
        at = pointers[:, None] + (row * stride + lane % 4 * 4 + column)[None, :]
        each = tl.load(at, mask=ok[:, None] & (row < num_rows)[None, :], other=0.0)
        # [blocks, row, pair, eight, column] -> [blocks, columns, row]
        each = tl.reshape(each, [STEPS * STRIDES, 8, 4, 2, 2])
        each = tl.reshape(tl.permute(each, (0, 3, 2, 4, 1)), [STEPS, 1, STRIDES, 16, 8])
        each = tl.broadcast_to(each, [STEPS, ROW_BLOCKS, STRIDES, 16, 8])
        found += (tl.reshape(each, [STEPS * ROW_BLOCKS * STRIDES, 16, 8]),)
    return found


@triton.jit
def _sums(ones, columns, PARTS: tl.constexpr, TILES: tl.constexpr):
    """Of the columns of each part and every 8 rows, in every row of a product: a tensor core's are
    where they are wanted.
    """
    found = ()
    for part in tl.static_range(PARTS):
        for i in tl.static_range(TILES):
            sum = tl.zeros([ones.shape[0], 16, 8], tl.float32)
            for quarter in tl.static_range(part * 4 // PARTS, (part + 1) * 4 // PARTS):
                sum = tl.dot(ones, columns[quarter * TILES + i], sum)
            found += (sum,)
    return found


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
    OWN: tl.constexpr = ROW_BLOCKS // 2 if PAIRED else ROW_BLOCKS  # of results
    BLOCKS: tl.constexpr = STEPS * ROW_BLOCKS * STRIDES
    STEP: tl.constexpr = STEPS * STRIDES
    DTYPE: tl.constexpr = x.dtype.element_ty
    split = tl.program_id(1)
    UNITS: tl.constexpr = ROW_BLOCKS * STRIDES
    batch = tl.arange(0, BLOCKS)  # [step, row block, stride]
    row_block = _row_block(batch, STRIDES, ROW_BLOCKS, OWN, num_row_blocks)
    # Blocks that follow each other in memory are one warp's.
    offset = batch % STRIDES * STEPS + batch // UNITS
    unit = tl.arange(0, UNITS)
    unit_row_block = _row_block(unit, STRIDES, ROW_BLOCKS, OWN, num_row_blocks)
    unit_offset = unit % STRIDES * STEPS
    width = tl.cdiv(tl.cdiv(num_blocks, STEP), tl.num_programs(1)) * STEP
    begin = split * width
    end = tl.minimum(begin + width, num_blocks)
    if PREFETCH:
        LINES: tl.constexpr = 8 if BITS == 8 else 4  # of a block of codes
        line = tl.arange(0, 128)
        for row in tl.static_range(ROW_BLOCKS):
            at_row = tl.minimum(tl.program_id(0) * OWN + row % OWN, num_row_blocks - 1)
            at_row += row // OWN * num_row_blocks
            first = codes + (at_row.to(tl.int64) * num_blocks + begin) * (LINES * 64)
            for at in range(0, (end - begin) * LINES, 128):
                _prefetch(first + tl.minimum(at + line, (end - begin) * LINES - 1) * 64)

    column_batch = tl.arange(0, STEP)  # [step, stride]
    column_offset = column_batch % STRIDES * STEPS + column_batch // STRIDES
    dim = num_blocks * 64
    columns_at = x + column_offset * 64
    loaded = _loaded(
        row_block,
        begin + offset,
        unit_row_block,
        begin + unit_offset,
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
        STEPS,
        BITS,
        GROUP,
        SUPERGROUP,
        SMALL,
        MINIMUM,
        SMALL_MINIMUMS,
    )
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)

    TILES: tl.constexpr = ROWS // 8  # of the right operand, the rows; the left is the weight
    total = ()
    for _ in tl.static_range(TILES):
        total += (tl.zeros([BLOCKS, 16, 8], tl.float32),)
    ones = tl.full([BLOCKS, 16, 16], 1.0, DTYPE)
    for at in range(begin, end, STEP):
        here = columns_at + at * 64
        columns_ok = at + column_offset < end
        columns = _columns(here, columns_ok, dim, num_rows, STEPS, ROW_BLOCKS, STRIDES, ROWS)
        for quarter in tl.static_range(1, 4):
            columns += _columns(
                here + 16 * quarter, columns_ok, dim, num_rows, STEPS, ROW_BLOCKS, STRIDES, ROWS
            )
        # What the next step wants is on its way meanwhile.
        coming = _loaded(
            row_block,
            at + STEP + offset,
            unit_row_block,
            at + STEP + unit_offset,
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
            STEPS,
            BITS,
            GROUP,
            SUPERGROUP,
            SMALL,
            MINIMUM,
            SMALL_MINIMUMS,
        )
        sums = None
        if MINIMUM != "none":
            sums = _sums(ones, columns, PARTS, TILES)
        total = _multiplied(
            total,
            loaded,
            columns,
            sums,
            at + offset < end,
            STEPS,
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
        loaded = coming

    for i in tl.static_range(TILES):
        result = _summed(total[i], STEPS, ROW_BLOCKS, STRIDES)
        m = 8 * i + tl.arange(0, 8)
        _store(
            result,
            residual,
            out,
            m,
            num_rows,
            split,
            num_row_blocks,
            SPLIT,
            PAIRED,
            ROW_BLOCKS,
            OWN,
        )


@triton.jit
def _store(
    result,
    residual,
    out,
    m,
    num_rows,
    split,
    num_row_blocks,
    SPLIT: tl.constexpr,
    PAIRED: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    OWN: tl.constexpr,
):
    """result: [rows of the weight, 8], of rows `m` of x."""
    num_outputs = num_row_blocks * 16
    m_ok = (m < num_rows)[None, :]
    if SPLIT:
        row = tl.arange(0, ROW_BLOCKS * 16)
        own_row = row % (OWN * 16) + tl.program_id(0) * OWN * 16
        n = own_row + row // (OWN * 16) * num_outputs
        width = num_outputs * (2 if PAIRED else 1)
        place = (split.to(tl.int64) * num_rows + m[None, :]) * width + n[:, None]
        ok = m_ok & (own_row < num_outputs)[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=ok)
    else:
        n = tl.program_id(0) * OWN * 16 + tl.arange(0, OWN * 16)
        ok = m_ok & (n < num_outputs)[:, None]
        place = m[None, :] * num_outputs + n[:, None]
        if PAIRED:
            gate, up = tl.split(tl.permute(tl.reshape(result, [2, OWN * 16, 8]), (1, 2, 0)))
            result = gate * tl.sigmoid(gate) * up
        if residual is not None:
            result += tl.load(residual + place, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _summed(
    total,
    STEPS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    STRIDES: tl.constexpr,
):
    """[blocks, 16, 8] -> [row blocks * 16, 8]."""
    split = tl.reshape(total, [STEPS, ROW_BLOCKS, STRIDES, 16, 8])
    return tl.reshape(tl.sum(tl.sum(split, 0), 1), [ROW_BLOCKS * 16, 8])


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
