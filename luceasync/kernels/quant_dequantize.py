"""Dequantisation of rows: those of an embedding, and slices of a matrix for library products with
many rows. Numbers are computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs
from luceasync.kernels.quant_decode import few_numbers, num_parts, real, small_number
from luceasync.kernels.quant_tiles import BLOCK_ROWS, TiledMatrix

BLOCKS = 16  # of 64 columns of a row per program
TILE_BLOCKS = 4  # of 64 columns of 16 rows per program


def lookup(weight: TiledMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up the rows of int64 ids [n]: [n, columns]."""
    out = torch.empty(len(ids), weight.num_columns, dtype=dtype, device=ids.device)
    _launch(weight, ids, out, 0)
    return out


def numbers(weight: TiledMatrix, begin: int, end: int, out: Tensor) -> None:
    """Dequantise rows [begin, end) into `out`, [end - begin, columns] contiguous."""
    assert out.is_contiguous() and out.shape == (end - begin, weight.num_columns)
    if begin % BLOCK_ROWS or len(out) % BLOCK_ROWS:
        _launch(weight, None, out, begin)
    else:
        _launch_tiles(weight, out, begin)


def _launch(weight: TiledMatrix, ids: Tensor | None, out: Tensor, begin: int) -> None:
    _numbers_kernel.launch(
        (len(out), triton.cdiv(weight.num_blocks, BLOCKS), 1),
        *_tensors(weight),
        ids,
        out,
        begin,
        weight.num_blocks,
        weight.num_supergroups,
        weight.num_groups,
        BLOCKS=BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,  # bit for bit as the reference
        **weight.coding.constants,
        **overlap_options(out),
    )


def _launch_tiles(weight: TiledMatrix, out: Tensor, begin: int) -> None:
    """`_launch` of whole blocks of rows: codes are read in the order in which they lie."""
    _tile_numbers_kernel.launch(
        (len(out) // BLOCK_ROWS, triton.cdiv(weight.num_blocks, TILE_BLOCKS), 1),
        *_tensors(weight),
        out,
        begin // BLOCK_ROWS,
        weight.num_blocks,
        weight.num_supergroups,
        weight.num_groups,
        BLOCKS=TILE_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
        **weight.coding.constants,
        **overlap_options(out),
    )


def _tensors(weight: TiledMatrix) -> tuple[Tensor | None, ...]:
    smalls = weight.small_scales, weight.minimums, weight.small_minimums
    return weight.codes, weight.planes, weight.scales, *smalls


@kernel(do_not_specialize=["begin"])
def _numbers_kernel(
    codes,
    planes,
    scales,
    small_scales,
    minimums,
    small_minimums,
    ids,
    out,
    begin,
    num_blocks,
    num_supergroups,
    num_groups,
    BLOCKS: tl.constexpr,
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
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    index = tl.program_id(0).to(tl.int64)
    row = index + begin
    if ids is not None:
        row = tl.load(ids + index)
    row_block = row // 16
    far, g = row % 16 // 8, row % 8
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ok = block < num_blocks
    place = row_block * num_blocks + block
    k = tl.arange(0, 16)
    pair, eight, column = k // 4, k % 4 // 2, k % 2
    WORDS: tl.constexpr = 512 if BITS == 8 else 256
    word = (((g * 4 + pair) * 2 + eight) * 2 + far) * 2 + column
    words_at = codes + place[:, None] * WORDS + word[None, :]
    words = tl.load(words_at, mask=ok[:, None], other=0)
    other_words = words
    if BITS == 8:
        other_words = tl.load(words_at + 256, mask=ok[:, None], other=0)
    high = None
    shift = (4 * (2 * eight + far.to(tl.int32)) if BITS == 5 else 8 * eight)[None, :]
    if BITS == 5:
        at = planes + _of_pairs(place, 2)[:, None] + ((g * 4 + pair) * 4 + column)[None, :]
        high = tl.load(at, mask=ok[:, None], other=0)
    if BITS == 6:
        at = (
            planes + _of_pairs(place, 4)[:, None] + ((g * 4 + pair) * 8 + far * 2 + column)[None, :]
        )
        high = tl.load(at, mask=ok[:, None], other=0)
    own = g * 2 + far  # index of the row among the scales of 16 rows
    small_place = place * 16 + own
    if PARTS == 1:
        group = block * 0
        if GROUP > 0:
            group = block // (GROUP // 64)
        small_place = (row_block * num_groups + group) * 16 + own
    if SMALL != "none":
        small_words = tl.load(small_scales + small_place, mask=ok, other=0)
    if SMALL_MINIMUMS:
        small_minimum_words = tl.load(small_minimums + small_place, mask=ok, other=0)
    EACH: tl.constexpr = SUPERGROUP == 16 or SUPERGROUP == 32
    for part in tl.static_range(PARTS):
        if part == 0 or EACH:
            supergroup = block * 0
            if EACH:
                supergroup = block * PARTS + part
            elif SUPERGROUP > 0:
                supergroup = block // (SUPERGROUP // 64)
            at = (row_block * num_supergroups + supergroup) * 16 + own
            supers = real(tl.load(scales + at, mask=ok, other=0), E8M0)
            super_minimums = supers
            if MINIMUM == "own":
                super_minimums = real(tl.load(minimums + at, mask=ok, other=0), E8M0)
        scale = supers
        if SMALL != "none":
            small = small_number(small_words, part, SMALL)
            scale = tl.div_rn(small, supers) if DIVIDES else supers * small
        if MINIMUM != "none":
            minimum = super_minimums
            if SMALL_MINIMUMS:
                minimum = super_minimums * small_number(small_minimum_words, part, "uint8")
        for quarter in tl.static_range(part * 4 // PARTS, (part + 1) * 4 // PARTS):
            number = few_numbers(
                other_words if quarter >= 2 else words,
                high,
                shift + (quarter if BITS == 5 else 2 * quarter),
                BITS,
                CODES,
                ZERO,
                TABLE,
                quarter,
                False,
                False,
                tl.float32,
            )
            number = number * scale[:, None]
            if MINIMUM != "none":
                number = number - minimum[:, None]
            to = out + (index * num_blocks + block)[:, None] * 64 + quarter * 16 + k[None, :]
            tl.store(to, number.to(out.dtype.element_ty), mask=ok[:, None])


@kernel(do_not_specialize=["first_block"])
def _tile_numbers_kernel(
    codes,
    planes,
    scales,
    small_scales,
    minimums,
    small_minimums,
    out,
    first_block,
    num_blocks,
    num_supergroups,
    num_groups,
    BLOCKS: tl.constexpr,
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
    EACH: tl.constexpr = SUPERGROUP == 16 or SUPERGROUP == 32
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row_block = (tl.program_id(0) + first_block).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    ok = block < num_blocks
    place = row_block * num_blocks + block
    WORDS: tl.constexpr = 512 if BITS == 8 else 256
    words_at = codes + place * WORDS + tl.arange(0, 256)[None, :]
    # Of a block's rows 8, columns by 4, by 2, rows by 8, columns.
    SPLIT: tl.constexpr = [BLOCKS, 8, 4, 2, 2, 2]
    words = tl.reshape(tl.load(words_at, mask=ok, other=0), SPLIT)
    other_words = words
    if BITS == 8:
        other_words = tl.reshape(tl.load(words_at + 256, mask=ok, other=0), SPLIT)
    high = None
    eight = tl.arange(0, 2)[None, None, None, :, None, None]
    far = tl.arange(0, 2)[None, None, None, None, :, None]
    shift = tl.broadcast_to((4 * (2 * eight + far) if BITS == 5 else 8 * eight + 0 * far), SPLIT)
    if BITS == 5:
        at = tl.arange(0, 64)
        at = planes + _of_pairs(place, 2) + (at // 2 * 4 + at % 2)[None, :]
        high = tl.reshape(tl.load(at, mask=ok, other=0), [BLOCKS, 8, 4, 1, 1, 2])
        high = tl.broadcast_to(high, SPLIT)
    if BITS == 6:
        at = tl.arange(0, 128)
        at = planes + _of_pairs(place, 4) + (at // 4 * 8 + at % 4)[None, :]
        high = tl.reshape(tl.load(at, mask=ok, other=0), [BLOCKS, 8, 4, 1, 2, 2])
        high = tl.broadcast_to(high, SPLIT)
    own = tl.arange(0, 16)[None, :]
    ok_row = ok & (own >= 0)
    small_place = place * 16 + own
    if PARTS == 1:
        group = block * 0
        if GROUP > 0:
            group = block // (GROUP // 64)
        small_place = (row_block * num_groups + group) * 16 + own
    if SMALL != "none":
        small_words = tl.load(small_scales + small_place, mask=ok_row, other=0)
    if SMALL_MINIMUMS:
        small_minimum_words = tl.load(small_minimums + small_place, mask=ok_row, other=0)
    found = ()
    for part in tl.static_range(PARTS):
        if part == 0 or EACH:
            supergroup = block * 0
            if EACH:
                supergroup = block * PARTS + part
            elif SUPERGROUP > 0:
                supergroup = block // (SUPERGROUP // 64)
            at = (row_block * num_supergroups + supergroup) * 16 + own
            supers = real(tl.load(scales + at, mask=ok_row, other=0), E8M0)
            super_minimums = supers
            if MINIMUM == "own":
                super_minimums = real(tl.load(minimums + at, mask=ok_row, other=0), E8M0)
        scale = supers
        if SMALL != "none":
            small = small_number(small_words, part, SMALL)
            scale = tl.div_rn(small, supers) if DIVIDES else supers * small
        if MINIMUM != "none":
            minimum = super_minimums
            if SMALL_MINIMUMS:
                minimum = super_minimums * small_number(small_minimum_words, part, "uint8")
        for quarter in tl.static_range(part * 4 // PARTS, (part + 1) * 4 // PARTS):
            number = few_numbers(
                other_words if quarter >= 2 else words,
                high,
                shift + (quarter if BITS == 5 else 2 * quarter),
                BITS,
                CODES,
                ZERO,
                TABLE,
                quarter,
                False,
                False,
                tl.float32,
            )
            number = number * tl.reshape(scale, [BLOCKS, 8, 1, 1, 2, 1])
            if MINIMUM != "none":
                number = number - tl.reshape(minimum, [BLOCKS, 8, 1, 1, 2, 1])
            found += (number.to(out.dtype.element_ty),)  # type: ignore[assignment]
    first, second, third, fourth = found  # type: ignore[misc]
    lower, upper = tl.join(first, second), tl.join(third, fourth)
    # Rows by 8, rows; blocks, columns by 32, by 16, by 4, by 2, columns.
    tile = tl.permute(tl.join(lower, upper), (4, 1, 0, 7, 6, 2, 3, 5))
    tile = tl.reshape(tile, [16, BLOCKS * 64])
    row = tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16)[:, None]
    column = tl.program_id(1) * BLOCKS * 64 + tl.arange(0, BLOCKS * 64)[None, :]
    num_columns = num_blocks * 64
    tl.store(out + row * num_columns + column, tile, mask=column < num_columns)


@triton.jit
def _of_pairs(place, EACH_LANE: tl.constexpr):
    """The offset of the first lane's words of a block: those of two blocks are stored together."""
    return (place // 2 * 64 + place % 2) * EACH_LANE
