"""Products of few rows with the quantised matrices of experts, tile by tile; like
luceasync.kernels.quant_gemv for one matrix.

The bits of a row do not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.experts_routing import TILE_ROWS
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs
from luceasync.kernels.quant_decode import num_parts
from luceasync.kernels.quant_gemv import QuantTile
from luceasync.kernels.quant_gemv_step import multiplied, nothing, stored_of, sums_of
from luceasync.kernels.quant_tiles import BLOCK_ROWS, TiledMatrix

# By bits of a code: tiles for paired matrices and for others, measured on an H100.
TILES = {
    4: (QuantTile(2, 4, 2), QuantTile(2, 1, 4)),
    5: (QuantTile(2, 4, 2), QuantTile(2, 2, 1)),
    6: (QuantTile(2, 4, 1), QuantTile(1, 2, 2)),
    8: (QuantTile(2, 4, 1), QuantTile(1, 2, 1)),
}


def linear(
    x: Tensor,
    matrices: TiledMatrix,
    num_experts: int,
    tiles: Tensor,
    num_places: int,
    *,
    shared: TiledMatrix | None = None,
    far: TiledMatrix | None = None,
    tile_rows: int = TILE_ROWS,
    is_listed: bool = False,
    chosen: QuantTile | None = None,
) -> Tensor:
    """x @ matrix^T of each tile's matrix, for rows at its places: [places, outputs].

    x: [places, dim]; matrices: [experts * outputs, dim], outputs a multiple of 16; tiles: see
    experts_routing.choose. `shared`: the matrix after all experts. `far`: like `matrices`, with any
    number of experts; tiles made for slots refer to these as the matrices after that one. All have
    one coding. `tile_rows`: the most rows of a tile, a power of 2 from 8 on. `is_listed`: the
    launch before this one has waited for the tiles, so matrices are loaded while it runs.
    """
    return _product(
        x,
        matrices,
        num_experts,
        tiles,
        num_places,
        None,
        shared,
        far,
        tile_rows,
        chosen,
        is_listed=is_listed,
    )


def swiglu(
    x: Tensor,
    matrices: TiledMatrix,
    num_experts: int,
    tiles: Tensor,
    rows: Tensor,
    *,
    shared: TiledMatrix | None = None,
    far: TiledMatrix | None = None,
    tile_rows: int = TILE_ROWS,
    fills: Tensor | None = None,
    chosen: QuantTile | None = None,
) -> Tensor:
    """silu(gate) * up of each place: [places, inner].

    x: [rows, dim]; `rows`: int32 [places], the row of each place; matrices: [2 * experts * inner,
    dim], all gates first. `fills`: what the launch before this one copies to slots, see
    experts_routing.choose; it has waited for the choice.
    """
    return _product(
        x,
        matrices,
        num_experts,
        tiles,
        len(rows),
        rows,
        shared,
        far,
        tile_rows,
        chosen,
        fills=fills,
    )


def _product(
    x: Tensor,
    weight: TiledMatrix,
    num_experts: int,
    tiles: Tensor,
    num_places: int,
    rows: Tensor | None,
    shared: TiledMatrix | None,
    far: TiledMatrix | None,
    tile_rows: int,
    chosen: QuantTile | None,
    *,
    is_listed: bool = False,
    fills: Tensor | None = None,
) -> Tensor:
    paired, is_nvidia = rows is not None, x.is_cuda and torch.version.hip is None
    num_outputs = weight.num_rows // (num_experts * (2 if paired else 1))
    num_row_blocks = num_outputs // BLOCK_ROWS
    chosen = chosen or TILES[weight.coding.bits][0 if paired else 1]
    own_blocks = chosen.row_blocks // 2 if paired else chosen.row_blocks
    num_fills = 0 if fills is None else len(fills)
    x, out = x.contiguous(), x.new_empty(num_places, num_outputs)
    _quant_rows_kernel.launch(
        (triton.cdiv(num_row_blocks, own_blocks), len(tiles), 1),
        x,
        *_tensors(weight),
        *_tensors(shared),
        *_tensors(far),
        rows,
        tiles,
        fills,
        num_fills,
        out,
        num_experts,
        num_experts * num_row_blocks,
        0 if far is None else far.num_rows // BLOCK_ROWS // (2 if paired else 1),
        num_row_blocks,
        weight.num_blocks,
        weight.num_supergroups,
        weight.num_groups,
        PAIRED=paired,
        EVEN=weight.num_blocks % (chosen.steps * chosen.strides) == 0,
        WIDTH=tile_rows if is_nvidia else max(tile_rows, 16),
        ROW_BLOCKS=chosen.row_blocks,
        STRIDES=chosen.strides,
        STEPS=chosen.steps,
        FILLS=triton.next_power_of_2(num_fills) if num_fills else 0,
        LISTED=is_listed,
        ASM=is_nvidia and x.dtype == torch.bfloat16,
        num_warps=chosen.strides,
        num_stages=1,
        **weight.coding.constants,
        **overlap_options(x),
    )
    return out


def _tensors(matrix: TiledMatrix | None) -> tuple[Tensor | None, ...]:
    """The tensors of a matrix in the order of the kernel's parameters; only None without a
    matrix."""
    if matrix is None:
        return (None,) * 6
    return (
        matrix.codes,
        matrix.planes,
        matrix.scales,
        matrix.small_scales,
        matrix.minimums,
        matrix.small_minimums,
    )


@kernel(
    do_not_specialize=[
        "num_fills",
        "num_experts",
        "part_blocks",
        "far_part_blocks",
        "num_row_blocks",
        "num_blocks",
    ]
)
def _quant_rows_kernel(
    x,
    codes,
    planes,
    scales,
    small_scales,
    minimums,
    small_minimums,
    shared_codes,
    shared_planes,
    shared_scales,
    shared_small_scales,
    shared_minimums,
    shared_small_minimums,
    far_codes,
    far_planes,
    far_scales,
    far_small_scales,
    far_minimums,
    far_small_minimums,
    rows,
    tiles,
    fills,
    num_fills,
    out,
    num_experts,
    part_blocks,
    far_part_blocks,
    num_row_blocks,
    num_blocks,
    num_supergroups,
    num_groups,
    PAIRED: tl.constexpr,
    EVEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    STRIDES: tl.constexpr,
    STEPS: tl.constexpr,
    FILLS: tl.constexpr,
    LISTED: tl.constexpr,
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
    UNITS: tl.constexpr = ROW_BLOCKS * STRIDES
    DTYPE: tl.constexpr = x.dtype.element_ty
    if FILLS == 0 and not LISTED:
        wait_for_inputs(OVERLAP)
        start_next(OVERLAP)
    at_tile = tiles + 3 * tl.program_id(1)
    matrix = tl.load(at_tile, cache_modifier=".cg")  # written while others of a layer ran here
    if matrix >= 0:
        if FILLS > 0:  # only what is being copied to slots is waited for
            fill = tl.arange(0, FILLS)
            at_fill = fills + 2 * fill + 1
            slot = tl.load(at_fill, mask=fill < num_fills, other=-1, cache_modifier=".cg")
            if tl.max((slot == matrix).to(tl.int32), 0) > 0:
                wait_for_inputs(OVERLAP)
            start_next(OVERLAP)
        begin_place = tl.load(at_tile + 1, cache_modifier=".cg")
        end_place = tl.load(at_tile + 2, cache_modifier=".cg")
        if shared_codes is not None:
            is_shared = matrix == num_experts
            matrix = tl.where(is_shared, 0, matrix)
            part_blocks = tl.where(is_shared, num_row_blocks, part_blocks)
            codes = tl.where(is_shared, shared_codes, codes)
            scales = tl.where(is_shared, shared_scales, scales)
            if planes is not None:
                planes = tl.where(is_shared, shared_planes, planes)
            if small_scales is not None:
                small_scales = tl.where(is_shared, shared_small_scales, small_scales)
            if minimums is not None:
                minimums = tl.where(is_shared, shared_minimums, minimums)
            if small_minimums is not None:
                small_minimums = tl.where(is_shared, shared_small_minimums, small_minimums)
        if far_codes is not None:
            is_far = matrix > num_experts
            matrix = tl.where(is_far, matrix - num_experts - 1, matrix)
            part_blocks = tl.where(is_far, far_part_blocks, part_blocks)
            codes = tl.where(is_far, far_codes, codes)
            scales = tl.where(is_far, far_scales, scales)
            if planes is not None:
                planes = tl.where(is_far, far_planes, planes)
            if small_scales is not None:
                small_scales = tl.where(is_far, far_small_scales, small_scales)
            if minimums is not None:
                minimums = tl.where(is_far, far_minimums, minimums)
            if small_minimums is not None:
                small_minimums = tl.where(is_far, far_small_minimums, small_minimums)
        matrix_block = matrix * num_row_blocks
        batch = tl.arange(0, BLOCKS)  # [step, row block, stride]
        row_block = matrix_block + _row_block_of(
            batch, STRIDES, ROW_BLOCKS, OWN, num_row_blocks, part_blocks
        )
        # Consecutive blocks in memory belong to one warp.
        offset = batch % STRIDES * STEPS + batch // UNITS
        unit = tl.arange(0, UNITS)
        unit_row_block = matrix_block + _row_block_of(
            unit, STRIDES, ROW_BLOCKS, OWN, num_row_blocks, part_blocks
        )
        unit_offset = unit % STRIDES * STEPS
        column_batch = tl.arange(0, STEP)  # [step, stride]
        column_offset = column_batch % STRIDES * STEPS + column_batch // STRIDES
        place = begin_place + tl.arange(0, 16 * WIDTH) // 16  # of each number of 16 columns
        place_ok = place < end_place
        row = place
        if rows is not None:
            row = tl.load(rows + place, mask=place_ok, other=0)
        at_row = row * (num_blocks * 64)

        loaded = stored_of(
            row_block,
            offset,
            unit_row_block,
            unit_offset,
            num_blocks,
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
        if LISTED:
            wait_for_inputs(OVERLAP)
            start_next(OVERLAP)
        total = nothing()
        total += (tl.zeros([BLOCKS, 16, WIDTH], tl.float32),)
        ones = tl.full([BLOCKS, 16, 16], 1.0, DTYPE)
        for at in range(0, num_blocks, STEP):
            here = x + (at + column_offset) * 64
            columns_ok = at + column_offset < num_blocks
            columns = nothing()
            for quarter in tl.static_range(4):
                columns += (
                    _columns_of(
                        here + 16 * quarter,
                        columns_ok,
                        at_row,
                        place_ok,
                        STEPS,
                        ROW_BLOCKS,
                        STRIDES,
                        WIDTH,
                    ),
                )
            # Load what the next step needs.
            coming = stored_of(
                row_block,
                at + STEP + offset,
                unit_row_block,
                at + STEP + unit_offset,
                num_blocks,
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
                sums = sums_of(ones, columns, PARTS, 1)
            total = multiplied(
                total,
                loaded,
                columns,
                sums,
                at + offset < num_blocks,
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

        each = tl.reshape(total[0], [STEPS, ROW_BLOCKS, STRIDES, 16, WIDTH])
        result = tl.reshape(tl.sum(tl.sum(each, 0), 1), [ROW_BLOCKS * 16, WIDTH])
        if PAIRED:
            halves = tl.permute(tl.reshape(result, [2, OWN * 16, WIDTH]), (1, 2, 0))
            gate, up = tl.split(halves)
            result = gate * tl.sigmoid(gate) * up
        num_outputs = num_row_blocks * 16
        n = tl.program_id(0) * OWN * 16 + tl.arange(0, OWN * 16)
        m = begin_place + tl.arange(0, WIDTH)
        ok = (m < end_place)[None, :] & (n < num_outputs)[:, None]
        at_out = out + m.to(tl.int64)[None, :] * num_outputs + n[:, None]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _row_block_of(
    batch,
    STRIDES: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    OWN: tl.constexpr,
    num_row_blocks,
    part_blocks,
):
    """The row block at an index of a batch [.., row block, stride], within the first matrix; those
    of ups follow all gates. Row blocks past the end read the last one, and are not stored.
    """
    own = batch // STRIDES % ROW_BLOCKS
    first = tl.minimum(tl.program_id(0) * OWN + own % OWN, num_row_blocks - 1)
    return first + own // OWN * part_blocks


@triton.jit
def _columns_of(
    pointers,
    ok,
    at_row,
    row_ok,
    STEPS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    STRIDES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Load 16 columns of the tile's rows for each block, as quant_gemv_step.columns_of does.
    at_row, row_ok: [16 * WIDTH], of each number's row. -> [blocks, 16, WIDTH].
    """
    lane, column = tl.arange(0, 16 * WIDTH) // 4, tl.arange(0, 16 * WIDTH) % 4
    at = pointers[:, None] + (at_row + lane % 4 * 4 + column)[None, :]
    each = tl.load(at, mask=ok[:, None] & row_ok[None, :], other=0.0)
    # [blocks, row, pair, eight, column] -> [blocks, columns, row]
    each = tl.reshape(each, [STEPS * STRIDES, WIDTH, 4, 2, 2])
    each = tl.reshape(tl.permute(each, (0, 3, 2, 4, 1)), [STEPS, 1, STRIDES, 16, WIDTH])
    each = tl.broadcast_to(each, [STEPS, ROW_BLOCKS, STRIDES, 16, WIDTH])
    return tl.reshape(each, [STEPS * ROW_BLOCKS * STRIDES, 16, WIDTH])
