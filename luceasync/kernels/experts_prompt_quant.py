"""Products of a prompt's rows with the quantised matrices of experts on Hopper, in Gluon: as
luceasync.kernels.experts_prompt, but the warps that copy also decode, so that no matrix is written
to memory in between.

Numbers are computed in float32 and rounded once, as luceasync.kernels.quant_dequantize does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from luceasync.kernels.experts_order import ExpertTiles
from luceasync.kernels.experts_prompt import (
    BLOCK_K,
    BLOCK_N,
    NUM_STAGES,
    ROWS,
    TILE_ROWS,
    block_layout,
    blocks_of,
    multiply_tiles,
    rows_to_copy,
    stages,
    tile_of,
)
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import num_multiprocessors
from luceasync.kernels.prefill_attention import is_hopper
from luceasync.kernels.quant_decode import Coding
from luceasync.kernels.quant_tiles import BLOCK_ROWS, TiledMatrix

MULTIPLY_REGISTERS, DECODE_REGISTERS = 168, 88  # of threads that multiply, and that decode
LAUNCH_REGISTERS = 128
EXPONENTS = 0x43004300  # of two bfloat16 numbers from 128 on, whose fractions are codes
# What is decoded, all in super-groups of 256: 4 bits, with scales and minimums for 32 columns, and
# 6 bits, with scales for 16.
DECODED = (
    Coding(4, "uint", 0, 32, 256, False, "uint8", "own", True, False),
    Coding(6, "uint", 32, 16, 256, False, "int8", "none", False, False),
)


def can_multiply(x: Tensor, matrices: TiledMatrix) -> bool:
    """Whether `multiply` supports such rows and matrices on their device."""
    if not (x.is_cuda and is_hopper(x.device.index or 0) and x.data_ptr() % 16 == 0):
        return False
    return x.dtype == torch.bfloat16 and matrices.coding in DECODED


def multiply(
    x: Tensor,
    matrices: TiledMatrix,
    num_experts: int,
    tiles: ExpertTiles,
    out: Tensor,
    *,
    rows: Tensor | None = None,
) -> None:
    """See experts_prompt. matrices: [parts * experts * outputs, dim], outputs a multiple of 16;
    all gates first, if there are `rows`.
    """
    gathers = rows is not None
    num_outputs = matrices.num_rows // (num_experts * (2 if gathers else 1))
    x = x.contiguous()
    _prompt_quant_kernel.launch(
        (num_multiprocessors(x), 1, 1),
        x if gathers else blocks_of(x, TILE_ROWS),
        matrices.codes.view(torch.int32),
        None if matrices.planes is None else matrices.planes.view(torch.int32),
        matrices.scales,
        matrices.small_scales,
        matrices.minimums,
        matrices.small_minimums,
        rows,
        *tiles,
        out,
        num_experts,
        num_outputs,
        matrices.num_columns,
        matrices.num_rows // BLOCK_ROWS,
        matrices.num_supergroups,
        EXPONENTS,
        BITS=matrices.coding.bits,
        LAYOUT=block_layout(BLOCK_N.value, x.dtype)[1],
        PAIRED=gathers,
        STAGES=NUM_STAGES,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS,
        DECODE_REGISTERS=DECODE_REGISTERS,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
        enable_fp_fusion=False,  # bit for bit as the reference
    )


@kernel(gluon.jit, do_not_specialize=["num_experts", "exponents"])
def _prompt_quant_kernel(
    x,
    codes,
    planes,
    scales,
    small_scales,
    minimums,
    small_minimums,
    rows,
    tiles,
    tile_bounds,
    out,
    num_experts,
    num_outputs,
    dim,
    num_row_blocks,
    num_supergroups,
    exponents,
    BITS: gl.constexpr,
    LAYOUT: gl.constexpr,
    PAIRED: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    DECODE_REGISTERS: gl.constexpr,
):
    WIDTH: gl.constexpr = BLOCK_N if PAIRED else 2 * BLOCK_N
    num_blocks = (num_outputs + WIDTH - 1) // WIDTH
    total = gl.load(tile_bounds + num_experts) * num_blocks
    work = (0, total, num_blocks, dim // BLOCK_K)
    to_second = num_experts * num_outputs if PAIRED else BLOCK_N
    sizes = (0, num_outputs, dim, to_second)

    stores, barriers = stages(out.dtype.element_ty, LAYOUT, STAGES, 2 if PAIRED else 3)
    stored = (codes, planes, scales, small_scales, minimums, small_minimums)
    coded = (num_row_blocks, num_supergroups, exponents)
    given = (x, stored, rows, tiles, stores, barriers, work, sizes, coded)
    gl.warp_specialize(
        [
            (multiply_tiles, (0, out, tiles, stores, barriers, work, sizes, PAIRED)),
            (multiply_tiles, (1, out, tiles, stores, barriers, work, sizes, PAIRED)),
            (_decode, (0, given, BITS, PAIRED)),
            (_decode, (1, given, BITS, PAIRED)),
        ],
        [4, 4, 4],
        [MULTIPLY_REGISTERS, DECODE_REGISTERS, DECODE_REGISTERS],
    )


@gluon.jit
def _decode(half: gl.constexpr, given, BITS: gl.constexpr, PAIRED: gl.constexpr):
    """Decode one of two blocks of rows of a tile of matrices, and copy rows of x: half of those
    that are gathered each, else the first decoder all. The codes of a step are loaded while those
    of the step before are decoded.
    """
    x, stored, rows, tiles, stores, barriers, work, sizes, coded = given
    x_rows, firsts, seconds = stores
    full, free = barriers
    exponents = coded[2]
    _, total, _, num_steps = work
    _, _, dim, to_second = sizes
    STAGES: gl.constexpr = x_rows.shape[0]
    WIDTH: gl.constexpr = BLOCK_N if PAIRED else 2 * BLOCK_N
    X_BYTES: gl.constexpr = 2 * ROWS * BLOCK_K * 2
    step = 0
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        begin, end, row = tile_of(i, tiles, work, sizes, WIDTH)
        if PAIRED:
            own_rows, column = rows_to_copy(x, rows, begin + half * ROWS, end, dim, ROWS)
        if half != 1:
            one = _load(stored, row, 0, num_steps, coded, BITS)
        if half != 0:
            two = _load(stored, row + to_second, 0, num_steps, coded, BITS)
        for k in range(num_steps):
            stage = step % STAGES
            own = full.index(stage)
            next_k = gl.minimum(k + 1, num_steps - 1)
            if half != 1:
                next_one = _load(stored, row, next_k, num_steps, coded, BITS)
            if half != 0:
                next_two = _load(stored, row + to_second, next_k, num_steps, coded, BITS)
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            at = k * BLOCK_K
            if PAIRED:
                async_copy.async_copy_global_to_shared(
                    x_rows.index(stage).slice(half * ROWS, ROWS, dim=0), own_rows + (column + at)
                )
                async_copy.commit_group()
            elif half != 1:
                mbarrier.expect(own, X_BYTES)
                tma.async_copy_global_to_shared(x, [begin, at], own, x_rows.index(stage))
            if half != 1:
                firsts.index(stage).store(_numbers(one, exponents, firsts.dtype, BITS))
                one = next_one
            if half != 0:
                seconds.index(stage).store(_numbers(two, exponents, firsts.dtype, BITS))
                two = next_two
            if PAIRED:
                if step > 0:  # the rows of the step before have been copied
                    async_copy.wait_group(1)
                    fence_async_shared()
                    mbarrier.arrive(full.index((step + STAGES - 1) % STAGES), count=1)
            else:
                fence_async_shared()
                mbarrier.arrive(own, count=1)
            step += 1
    if PAIRED:
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)


@gluon.jit
def _load(stored, row, k, num_steps, coded, BITS: gl.constexpr):
    """What is stored of 64 columns of 128 rows: words of 8 codes, [row blocks, row by 1, columns by
    2, row by 8], and scales and minimums, [row blocks, row by 1, row by 8].
    """
    codes, planes, scales, small_scales, minimums, small_minimums = stored
    num_row_blocks, num_supergroups, _ = coded
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 4, 2], [2, 8, 2, 1], [4, 1, 1, 1], [3, 1, 2, 0])
    block, g, pair, far = _indices(WORDS)
    row_block = gl.minimum(row // 16 + block, num_row_blocks - 1)
    place = row_block * num_steps + k
    words = gl.load(codes + (place * 128 + g * 16 + pair * 2 + far))
    high = words
    if BITS == 6:
        at = place // 2 * 128 + place % 2 * 2 + (g * 4 + pair // 2) * 4 + far
        high = gl.load(planes + at) >> (8 * (pair % 2))
    OF_ROWS: gl.constexpr = gl.SliceLayout(2, WORDS)
    block = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, OF_ROWS)))[:, None, None]
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, OF_ROWS)))[None, :, None]
    far = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, OF_ROWS)))[None, None, :]
    row_block = gl.minimum(row // 16 + block, num_row_blocks - 1)
    at = (row_block * num_supergroups + k // 4) * 16 + g * 2 + far
    small_at = (row_block * num_steps + k) * 16 + g * 2 + far
    supers = gl.load(scales + at)
    smalls = gl.load(small_scales + small_at)
    if BITS == 6:
        return words, high, supers, smalls, supers, smalls
    else:
        return (
            words,
            high,
            supers,
            smalls,
            gl.load(minimums + at),
            gl.load(small_minimums + small_at),
        )


@gluon.jit
def _indices(LAYOUT: gl.constexpr):
    """The indices of words of 8 codes along each dimension."""
    INNER: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    block = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, INNER)))
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, INNER)))
    pair = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, INNER)))
    FAR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    far = gl.arange(0, 2, layout=FAR)
    return (
        block[:, None, None, None],
        g[None, :, None, None],
        pair[None, None, :, None],
        far[None, None, None, :],
    )


@gluon.jit
def _numbers(loaded, exponents, DTYPE: gl.constexpr, BITS: gl.constexpr):
    """Decode what `_load` has loaded: [128, 64]."""
    first = gl.join(
        _quarter(loaded, exponents, 0, DTYPE, BITS), _quarter(loaded, exponents, 1, DTYPE, BITS)
    )
    second = gl.join(
        _quarter(loaded, exponents, 2, DTYPE, BITS), _quarter(loaded, exponents, 3, DTYPE, BITS)
    )
    # Rows by 16, by 8, rows; columns by 32, by 16, by 2, columns.
    return gl.join(first, second).permute((0, 3, 1, 6, 5, 2, 4)).reshape([128, 64])


@gluon.jit
def _quarter(loaded, exponents, quarter: gl.constexpr, DTYPE: gl.constexpr, BITS: gl.constexpr):
    """Columns [16 quarter, 16 quarter + 16): [.., column by 1]."""
    words, high, supers, smalls, super_minimums, small_minimums = loaded
    # The codes of two columns as numbers from 128 on: fewer instructions than converting integers.
    # The exponents are a parameter: an instruction has room for one constant, which is the mask.
    pair = words >> (4 * quarter) & 0x000F000F
    if BITS == 6:
        pair = pair | (high >> (2 * quarter) & 0x00030003) << 4
    pair = pair | exponents
    even = gl.cast(pair << 16, gl.float32, bitcast=True)
    odd = gl.cast(pair & -65536, gl.float32, bitcast=True)
    if BITS == 6:
        small = smalls << (24 - 8 * quarter) >> 24
        scale = (supers.to(gl.float32) * small.to(gl.float32))[:, :, None, :]
        one = (even - 160.0) * scale
        two = (odd - 160.0) * scale
    else:
        small = smalls.to(gl.int32) >> (quarter // 2 * 8) & 255
        scale = (supers.to(gl.float32) * small.to(gl.float32))[:, :, None, :]
        small = small_minimums.to(gl.int32) >> (quarter // 2 * 8) & 255
        minimum = (super_minimums.to(gl.float32) * small.to(gl.float32))[:, :, None, :]
        even, scale = gl.broadcast(even, scale)
        odd, minimum = gl.broadcast(odd, minimum)
        one = gl.fma(even - 128.0, scale, -minimum)
        two = gl.fma(odd - 128.0, scale, -minimum)
    return gl.join(one.to(DTYPE), two.to(DTYPE))
