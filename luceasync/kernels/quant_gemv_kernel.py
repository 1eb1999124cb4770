"""The kernels of luceasync.kernels.quant_gemv: each warp takes a stretch of columns, and their sums
are added at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import start_next, wait_for_inputs
from luceasync.kernels.quant_decode import num_parts
from luceasync.kernels.quant_gemv_step import (
    columns_of,
    multiplied,
    nothing,
    row_block_of,
    stored_of,
    sums_of,
)


@triton.jit
def _prefetch(pointers):
    """Prefetch the cache lines of these bytes, without waiting."""
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
def quant_gemv_kernel(
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
    WIDTH: tl.constexpr,
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
    row_block = row_block_of(batch, STRIDES, ROW_BLOCKS, OWN, num_row_blocks)
    # Consecutive blocks in memory belong to one warp.
    offset = batch % STRIDES * STEPS + batch // UNITS
    unit = tl.arange(0, UNITS)
    unit_row_block = row_block_of(unit, STRIDES, ROW_BLOCKS, OWN, num_row_blocks)
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
    loaded = stored_of(
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

    TILES: tl.constexpr = (
        ROWS // WIDTH
    )  # width of the right operand, the rows; the left one is the weight
    total = nothing()
    for _ in tl.static_range(TILES):
        total += (tl.zeros([BLOCKS, 16, WIDTH], tl.float32),)
    ones = tl.full([BLOCKS, 16, 16], 1.0, DTYPE)
    for at in range(begin, end, STEP):
        here = columns_at + at * 64
        columns_ok = at + column_offset < end
        columns = columns_of(
            here, columns_ok, dim, num_rows, STEPS, ROW_BLOCKS, STRIDES, ROWS, WIDTH
        )
        for quarter in tl.static_range(1, 4):
            columns += columns_of(
                here + 16 * quarter,
                columns_ok,
                dim,
                num_rows,
                STEPS,
                ROW_BLOCKS,
                STRIDES,
                ROWS,
                WIDTH,
            )
        # Load what the next step needs.
        coming = stored_of(
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
            sums = sums_of(ones, columns, PARTS, TILES)
        total = multiplied(
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
        m = WIDTH * i + tl.arange(0, WIDTH)
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
    """Store result: [rows of the weight, WIDTH], of rows `m` of x."""
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
            gate, up = tl.split(
                tl.permute(tl.reshape(result, [2, OWN * 16, m.shape[0]]), (1, 2, 0))
            )
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
    """[blocks, 16, WIDTH] -> [row blocks * 16, WIDTH]."""
    split = tl.reshape(total, [STEPS, ROW_BLOCKS, STRIDES, 16, total.shape[2]])
    return tl.reshape(tl.sum(tl.sum(split, 0), 1), [ROW_BLOCKS * 16, total.shape[2]])


@kernel()
def sum_parts_kernel(
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
