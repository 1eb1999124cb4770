"""Products of a prompt's rows with the matrices of experts on Hopper, in Gluon.

Some warps copy tiles of rows and of matrices, and two warpgroups multiply; a program takes one tile
after the other, so that copies for the next one begin while results are stored. Each row's sums are
added in the same order, whatever tile it is in.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from luceasync.kernels.experts_order import ExpertTiles
from luceasync.kernels.experts_product import MANY_ROWS
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import num_multiprocessors
from luceasync.kernels.prefill_attention import is_hopper

ROWS = gl.constexpr(64)  # of a warpgroup
TILE_ROWS = 128
BLOCK_N = gl.constexpr(128)  # rows of a gate and of an up, or of each half of another matrix
BLOCK_K = gl.constexpr(64)
NUM_STAGES = 4
LAG = gl.constexpr(2)  # copies of rows in flight behind the newest one
LAUNCH_REGISTERS = 168  # of a thread
COPY_REGISTERS, GATHER_REGISTERS = (240, 24), (232, 40)  # of threads that multiply, and that copy


def tile_rows(tensor: Tensor) -> int:
    """Rows of a tile of a prompt on the tensor's device."""
    is_fast = tensor.is_cuda and is_hopper(tensor.device.index or 0)
    return TILE_ROWS if is_fast else MANY_ROWS


def can_multiply(x: Tensor, matrices: Tensor) -> bool:
    """Whether `multiply` supports such rows and matrices on their device."""
    if not (x.is_cuda and x.dtype == matrices.dtype and is_hopper(x.device.index or 0)):
        return False
    is_half, (num_outputs, dim) = x.dtype in (torch.bfloat16, torch.float16), matrices.shape[-2:]
    is_aligned = x.data_ptr() % 16 == 0 and matrices.data_ptr() % 16 == 0
    return is_half and is_aligned and dim % BLOCK_K.value == 0 and num_outputs % 16 == 0


def multiply(
    x: Tensor,
    matrices: Tensor,
    tiles: ExpertTiles,
    out: Tensor,
    *,
    rows: Tensor | None = None,
    first: int = 0,
) -> None:
    """x @ matrix^T at the places of tiles of TILE_ROWS: [places, outputs].

    x: [places, dim], and matrices: [1, experts, outputs, dim]; or x: [rows, dim] and `rows`, the
    row of each place, and [2, experts, inner, dim], of which silu(gate) * up are the results.
    `first`: the number of the first of `matrices`; places of other experts stay as they are.
    """
    num_parts, num_experts, num_outputs, dim = matrices.shape
    assert matrices.is_contiguous() and (num_parts == 2) == (rows is not None)
    x, gathers = x.contiguous(), rows is not None
    multiply_registers, load_registers = GATHER_REGISTERS if gathers else COPY_REGISTERS
    _prompt_rows_kernel.launch(
        (num_multiprocessors(x), 1, 1),
        x if gathers else blocks_of(x, TILE_ROWS),
        blocks_of(matrices.view(-1, dim), BLOCK_N.value),
        rows,
        *tiles,
        out,
        first,
        num_experts,
        num_outputs,
        dim,
        PAIRED=gathers,
        STAGES=NUM_STAGES,
        LOAD_WARPS=4 if gathers else 1,
        MULTIPLY_REGISTERS=multiply_registers,
        LOAD_REGISTERS=load_registers,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
    )


class _Blocks(TensorDescriptor):  # type: ignore[misc]  # Triton brings no types
    """A descriptor that is created in a third of the time, because nothing is checked."""

    def __post_init__(self) -> None:
        pass

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a program is compiled for."""
        return *self.block_shape, self.base.dtype


def blocks_of(x: Tensor, num_rows: int) -> TensorDescriptor:
    """A descriptor of rows [.., dim] for copies of `num_rows` rows, BLOCK_K columns each."""
    block, layout = block_layout(num_rows, x.dtype)
    return _Blocks(x, list(x.shape), list(x.stride()), block, layout)


@functools.cache
def block_layout(num_rows: int, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    """The layout of a block of rows in shared memory."""
    block = [num_rows, BLOCK_K.value]
    of = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return block, gl.NVMMASharedLayout.get_default_for(block, of)


@kernel(gluon.jit, do_not_specialize=["first", "num_experts"])
def _prompt_rows_kernel(
    x,
    matrices,
    rows,
    tiles,
    tile_bounds,
    out,
    first,
    num_experts,
    num_outputs,
    dim,
    PAIRED: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD_WARPS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    first_tile = gl.load(tile_bounds + first)
    end_tile = gl.load(tile_bounds + first + num_experts)
    WIDTH: gl.constexpr = BLOCK_N if PAIRED else 2 * BLOCK_N
    num_blocks = (num_outputs + WIDTH - 1) // WIDTH
    work = (first_tile, (end_tile - first_tile) * num_blocks, num_blocks, dim // BLOCK_K)
    # What is added to the number of a row of the first block of a matrix for the second one.
    to_second = num_experts * num_outputs if PAIRED else BLOCK_N
    sizes = (first, num_outputs, dim, to_second)

    DTYPE: gl.constexpr = matrices.dtype
    LAYOUT: gl.constexpr = matrices.layout
    stores, barriers = stages(DTYPE, LAYOUT, STAGES, 2 if PAIRED else 1)
    gl.warp_specialize(
        [
            (multiply_tiles, (0, out, tiles, stores, barriers, work, sizes, PAIRED)),
            (multiply_tiles, (1, out, tiles, stores, barriers, work, sizes, PAIRED)),
            (
                _gather if PAIRED else _copy,
                (x, matrices, rows, tiles, stores, barriers, work, sizes),
            ),
        ],
        [4, LOAD_WARPS],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


@gluon.jit
def stages(
    DTYPE: gl.constexpr, LAYOUT: gl.constexpr, STAGES: gl.constexpr, NUM_ARRIVALS: gl.constexpr
):
    """Shared memory for rows and two blocks of a matrix; barriers that say that they are full, once
    NUM_ARRIVALS have said so, and free.
    """
    x_rows = gl.allocate_shared_memory(DTYPE, [STAGES, 2 * ROWS, BLOCK_K], LAYOUT)
    firsts = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], LAYOUT)
    seconds = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=NUM_ARRIVALS)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    return (x_rows, firsts, seconds), (full, free)


@gluon.jit
def tile_of(i, tiles, work, sizes, WIDTH: gl.constexpr):
    """Of a program's i-th tile: its places [begin, end), and the row of its matrix, WIDTH at a
    time, that it begins with.
    """
    first_tile, _, num_blocks, _ = work
    first, num_outputs, _, _ = sizes
    at_tile = tiles + 3 * (first_tile + i // num_blocks)
    row = (gl.load(at_tile) - first) * num_outputs + i % num_blocks * WIDTH
    return gl.load(at_tile + 1), gl.load(at_tile + 2), row


@gluon.jit
def rows_to_copy(x, rows, begin, end, dim, NUM_ROWS: gl.constexpr):
    """Pointers to the rows at places from `begin` on, the last before `end`, and columns."""
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPIED))[None, :]
    tile_row = gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(1, COPIED))
    place = gl.minimum(begin + tile_row, end - 1)
    return x + gl.load(rows + place).to(gl.int64)[:, None] * dim, column


@gluon.jit
def _copy(x, matrices, rows, tiles, stores, barriers, work, sizes):
    """Copy tiles of x, whose rows lie at their places, and of matrices. Rows after the last one of
    a tile are those of other experts.
    """
    x_rows, firsts, seconds = stores
    full, free = barriers
    _, total, _, num_steps = work
    _, _, _, to_second = sizes
    STAGES: gl.constexpr = x_rows.shape[0]
    NUM_BYTES: gl.constexpr = (2 * ROWS + 2 * BLOCK_N) * BLOCK_K * 2
    step = 0
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        place, _, row = tile_of(i, tiles, work, sizes, 2 * BLOCK_N)
        for k in range(num_steps):
            stage = step % STAGES
            own = full.index(stage)
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(own, NUM_BYTES)
            at = k * BLOCK_K
            tma.async_copy_global_to_shared(x, [place, at], own, x_rows.index(stage))
            tma.async_copy_global_to_shared(matrices, [row, at], own, firsts.index(stage))
            second = row + to_second
            tma.async_copy_global_to_shared(matrices, [second, at], own, seconds.index(stage))
            step += 1


@gluon.jit
def _gather(x, matrices, rows, tiles, stores, barriers, work, sizes):
    """Copy the rows of tiles from where they are in x, and tiles of matrices."""
    x_rows, firsts, seconds = stores
    full, free = barriers
    _, total, _, num_steps = work
    _, _, dim, to_second = sizes
    STAGES: gl.constexpr = x_rows.shape[0]
    NUM_BYTES: gl.constexpr = 2 * BLOCK_N * BLOCK_K * 2
    step = 0
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        begin, end, row = tile_of(i, tiles, work, sizes, BLOCK_N)
        own_rows, column = rows_to_copy(x, rows, begin, end, dim, 2 * ROWS)
        for k in range(num_steps):
            stage = step % STAGES
            own = full.index(stage)
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(own, NUM_BYTES)
            at = k * BLOCK_K
            tma.async_copy_global_to_shared(matrices, [row, at], own, firsts.index(stage))
            second = row + to_second
            tma.async_copy_global_to_shared(matrices, [second, at], own, seconds.index(stage))
            async_copy.async_copy_global_to_shared(x_rows.index(stage), own_rows + (column + at))
            async_copy.commit_group()
            if step >= LAG:
                async_copy.wait_group(LAG)
                fence_async_shared()
                mbarrier.arrive(full.index((step - LAG) % STAGES), count=1)
            step += 1
    async_copy.wait_group(0)
    fence_async_shared()
    for j in range(gl.maximum(step - LAG, 0), step):
        mbarrier.arrive(full.index(j % STAGES), count=1)


@gluon.jit
def multiply_tiles(
    group: gl.constexpr, out, tiles, stores, barriers, work, sizes, PAIRED: gl.constexpr
):
    """Multiply and store the rows of one warpgroup."""
    x_rows, firsts, seconds = stores
    full, free = barriers
    _, total, num_blocks, num_steps = work
    _, num_outputs, _, _ = sizes
    STAGES: gl.constexpr = x_rows.shape[0]
    WIDTH: gl.constexpr = BLOCK_N if PAIRED else 2 * BLOCK_N
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, STORED))[None, :]
    tile_row = group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))[:, None]
    step = 0
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        begin, end, _ = tile_of(i, tiles, work, sizes, WIDTH)
        if begin + group * ROWS < end:
            one = gl.zeros([ROWS, BLOCK_N], gl.float32, SUMS)
            two = gl.zeros([ROWS, BLOCK_N], gl.float32, SUMS)
            for k in range(num_steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                own = x_rows.index(stage).slice(group * ROWS, ROWS, dim=0)
                one = warpgroup_mma(own, firsts.index(stage).permute((1, 0)), one, is_async=True)
                two = warpgroup_mma(own, seconds.index(stage).permute((1, 0)), two, is_async=True)
                # The products of the step before have ended: its tiles may be replaced.
                one, two = warpgroup_mma_wait(num_outstanding=2, deps=(one, two))
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                step += 1
            one, two = warpgroup_mma_wait(num_outstanding=0, deps=(one, two))
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
            place = begin + tile_row
            n = i % num_blocks * WIDTH + column
            at = out + place.to(gl.int64) * num_outputs + n
            ok = (place < end) & (n < num_outputs)
            if PAIRED:
                one = one / (1.0 + gl.exp(-one)) * two
                gl.store(at, gl.convert_layout(one.to(out.dtype.element_ty), STORED), mask=ok)
            else:
                gl.store(at, gl.convert_layout(one.to(out.dtype.element_ty), STORED), mask=ok)
                ok = (place < end) & (n + BLOCK_N < num_outputs)
                two = gl.convert_layout(two.to(out.dtype.element_ty), STORED)
                gl.store(at + BLOCK_N, two, mask=ok)
        else:  # the tile has no rows for this warpgroup
            for _ in range(num_steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                mbarrier.arrive(free.index(stage), count=1)
                step += 1
