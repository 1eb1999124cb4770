"""Causal attention of a prompt's rows on Hopper: FlashAttention-3 (Shah et al., 2024) in Gluon.

One warp copies blocks of keys and values, and two warpgroups attend: each one's softmax runs beside
products. Blocks begin at multiples of their size of absolute positions, and masked keys change
nothing, so a row's bits do not depend on the rows of its chunk.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from luceasync.kernels.kernel import kernel

BLOCK_KEYS = {64: 128, 128: 128, 256: 64}  # by head size; two blocks of each kind in flight
NUM_STAGES = 2
ROWS = gl.constexpr(64)  # of a warpgroup: the least that it can multiply
NUM_GROUPS = gl.constexpr(2)  # warpgroups that attend
LOWEST = gl.constexpr(-1e30)  # below any score, yet differences with it are finite
TILE_ROWS = 128
LAUNCH_REGISTERS, ATTEND_REGISTERS, LOAD_REGISTERS = 168, 240, 24  # of a thread


def can_attend(q: Tensor) -> bool:
    """Whether `attend_rows` supports such queries, [rows, heads, head_dim], on their device."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if not (q.is_cuda and is_half and q.shape[2] in BLOCK_KEYS):
        return False
    return is_hopper(q.device.index or 0)


@functools.cache
def is_hopper(device_index: int) -> bool:
    """Whether a GPU has the instructions of the kernel."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index) == (9, 0)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, begin: Tensor | None = None
) -> Tensor:
    """Attend causally with the last rows of a sequence.

    q: [rows, heads, head_dim] contiguous; k, v: [span, kv_heads, head_dim] in order of position, of
    which the last `rows` are those of q; the heads of a row are contiguous. A row sees the newest
    `window` positions, or all. `begin`, with a window: int32 [1], the position of the first row;
    keys before position 0 are not seen. Returns [rows, heads, head_dim].
    """
    (num_rows, num_heads, head_dim), (span, num_kv_heads, _) = q.shape, k.shape
    assert (window is None) == (begin is None), "a window lies at positions that only `begin` tells"
    out = torch.empty_like(q)
    block_keys = BLOCK_KEYS[head_dim]
    scale = head_dim**-0.5 * 1.4426950408889634  # scores in base 2
    _attend_prompt_kernel.launch(
        (num_heads, -(-num_rows // TILE_ROWS), 1),
        *(_blocks_of(x, ROWS.value) for x in (q, out)),
        *(_blocks_of(x, block_keys) for x in (k, v)),
        begin,
        num_rows,
        span,
        scale,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_KEYS=block_keys,
        WINDOW=window or 0,
        STAGES=NUM_STAGES,
        ATTEND_REGISTERS=ATTEND_REGISTERS,
        LOAD_REGISTERS=LOAD_REGISTERS,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
    )
    return out


class _Blocks(TensorDescriptor):  # type: ignore[misc]  # Triton brings no types
    """A descriptor that is created in a third of the time, because nothing is checked."""

    def __post_init__(self) -> None:
        pass

    @property
    def kind(self) -> tuple[int, int, torch.dtype]:
        """What a program is compiled for."""
        return *self.block_shape, self.base.dtype


def _blocks_of(x: Tensor, num_rows: int) -> TensorDescriptor:
    """A descriptor of [rows, heads * head_dim] for copies of `num_rows` rows of one head."""
    rows, num_heads, head_dim = x.shape
    row_stride, head_stride, stride = x.stride()
    assert stride == 1 and (num_heads == 1 or head_stride == head_dim), x.stride()
    assert x.data_ptr() % 16 == 0 and row_stride % 8 == 0, "rows are not aligned to 16 bytes"
    block, layout = _layout(num_rows, head_dim, x.dtype)
    return _Blocks(x, [rows, num_heads * head_dim], [row_stride, 1], block, layout)


@functools.cache
def _layout(
    num_rows: int, head_dim: int, dtype: torch.dtype
) -> tuple[list[int], gl.NVMMASharedLayout]:
    """The layout of a block of rows in shared memory. Creating it takes longer than the rest of a
    launch."""
    block = [num_rows, head_dim]
    of = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return block, gl.NVMMASharedLayout.get_default_for(block, of)


@kernel(gluon.jit, do_not_specialize=["begin", "num_rows", "span"])
def _attend_prompt_kernel(
    queries,
    out,
    keys,
    values,
    begin,
    num_rows,
    span,
    scale,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    head = gl.program_id(0)
    # Later rows see more keys: the longest programs start first.
    first_row = (gl.num_programs(1) - 1 - gl.program_id(1)) * (ROWS * NUM_GROUPS)
    # Below, a key's number is its row in `keys`, and a query's that of its own key.
    before = span - num_rows
    own = before + first_row
    shift = 0  # of blocks, so that they begin at multiples of their size of absolute positions
    hidden = 0  # keys before position 0
    oldest = 0  # key that the tile sees
    if WINDOW > 0:
        position = gl.load(begin)
        shift = (position - before) & (BLOCK_KEYS - 1)
        hidden = gl.maximum(before - position, 0)
        oldest = gl.maximum(own + 1 - WINDOW, hidden)
    last = (gl.minimum(own + ROWS * NUM_GROUPS, span) - 1 + shift) // BLOCK_KEYS
    num_blocks = last + 1 - (oldest + shift) // BLOCK_KEYS

    q_rows = gl.allocate_shared_memory(queries.dtype, [NUM_GROUPS, ROWS, HEAD_DIM], queries.layout)
    k_rows = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_KEYS, HEAD_DIM], keys.layout)
    v_rows = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_KEYS, HEAD_DIM], values.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=NUM_GROUPS)
        mbarrier.init(v_free.index(i), count=NUM_GROUPS)

    stores = (q_rows, k_rows, v_rows)
    barriers = (q_full, k_full, k_free, v_full, v_free)
    blocks = (num_blocks, last, shift)
    place = (own, first_row, head)
    gl.warp_specialize(
        [
            (_attend_rows, (0, out, stores, barriers, blocks, place, hidden, scale, WINDOW)),
            (_attend_rows, (1, out, stores, barriers, blocks, place, hidden, scale, WINDOW)),
            (_load_rows, (queries, keys, values, stores, barriers, blocks, place, GROUP)),
        ],
        [4, 1],
        [ATTEND_REGISTERS, LOAD_REGISTERS],
    )


@gluon.jit
def _load_rows(queries, keys, values, stores, barriers, blocks, place, GROUP: gl.constexpr):
    """Copy the queries of a tile, then blocks of keys and values, the newest first."""
    q_rows, k_rows, v_rows = stores
    q_full, k_full, k_free, v_full, v_free = barriers
    num_blocks, last, shift = blocks
    _, first_row, head = place
    ROWS_EACH: gl.constexpr = q_rows.shape[1]
    HEAD_DIM: gl.constexpr = q_rows.shape[2]
    STAGES: gl.constexpr = k_rows.shape[0]
    BLOCK_KEYS: gl.constexpr = k_rows.shape[1]
    BLOCK_BYTES: gl.constexpr = BLOCK_KEYS * HEAD_DIM * 2
    mbarrier.expect(q_full, NUM_GROUPS * ROWS_EACH * HEAD_DIM * 2)
    for i in gl.static_range(NUM_GROUPS):
        at = [first_row + i * ROWS_EACH, head * HEAD_DIM]
        tma.async_copy_global_to_shared(queries, at, q_full, q_rows.index(i))
    column = head // GROUP * HEAD_DIM
    for j in range(num_blocks):
        stage = j % STAGES
        turn = (j // STAGES) & 1
        row = (last - j) * BLOCK_KEYS - shift
        mbarrier.wait(k_free.index(stage), turn ^ 1)
        mbarrier.expect(k_full.index(stage), BLOCK_BYTES)
        tma.async_copy_global_to_shared(
            keys, [row, column], k_full.index(stage), k_rows.index(stage)
        )
        mbarrier.wait(v_free.index(stage), turn ^ 1)
        mbarrier.expect(v_full.index(stage), BLOCK_BYTES)
        tma.async_copy_global_to_shared(
            values, [row, column], v_full.index(stage), v_rows.index(stage)
        )


@gluon.jit
def _attend_rows(
    group: gl.constexpr,
    out,
    stores,
    barriers,
    blocks,
    place,
    hidden,
    scale,
    WINDOW: gl.constexpr,
):
    """Attend with the rows of one warpgroup, from the newest block on."""
    q_rows, k_rows, v_rows = stores
    q_full, k_full, k_free, v_full, _ = barriers
    num_blocks, last, shift = blocks
    own, first_row, head = place
    HEAD_DIM: gl.constexpr = q_rows.shape[2]
    STAGES: gl.constexpr = k_rows.shape[0]
    BLOCK_KEYS: gl.constexpr = k_rows.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    own += group * ROWS
    row = own + gl.arange(0, ROWS, layout=OF_SCORES)
    best = gl.full([ROWS], LOWEST, gl.float32, OF_SCORES)
    weight = gl.zeros([ROWS], gl.float32, OF_SCORES)
    total = gl.zeros([ROWS, HEAD_DIM], gl.float32, SUMS)
    q = q_rows.index(group)

    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    zeros = gl.zeros([ROWS, BLOCK_KEYS], gl.float32, SCORES)
    s = warpgroup_mma(q, k_rows.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    mbarrier.arrive(k_free.index(0), count=1)
    seen = (row, last * BLOCK_KEYS - shift, hidden)
    p, best, weight, _ = _weigh(s, best, weight, scale, seen, SCORES, True, WINDOW)
    p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, SUMS, 2))
    _wait_for_keys(k_full, 1, num_blocks, STAGES)

    # Blocks of which some rows see a part: the newest, and in a window the oldest.
    num_newest = gl.maximum(last + 1 - (own + 1 + shift) // BLOCK_KEYS, 1)
    num_newest = gl.minimum(num_newest, num_blocks)
    num_whole = num_blocks
    if WINDOW > 0:
        seen_by_all = gl.maximum(own + ROWS - WINDOW, hidden) + shift
        num_whole = last + 1 - (seen_by_all + BLOCK_KEYS - 1) // BLOCK_KEYS
        num_whole = gl.minimum(gl.maximum(num_whole, num_newest), num_blocks)
    state = (total, p, best, weight)
    given = (q, stores, barriers, blocks, row, hidden, scale)
    state = _attend_blocks(1, num_newest, state, given, True, WINDOW)
    state = _attend_blocks(num_newest, num_whole, state, given, False, WINDOW)
    if WINDOW > 0:
        state = _attend_blocks(num_whole, num_blocks, state, given, True, WINDOW)
    total, p, best, weight = state

    end = num_blocks - 1
    mbarrier.wait(v_full.index(end % STAGES), (end // STAGES) & 1)
    total = warpgroup_mma(p, v_rows.index(end % STAGES), total, is_async=True)
    total, p = warpgroup_mma_wait(num_outstanding=0, deps=(total, p))
    total = total * gl.convert_layout(1.0 / weight, gl.SliceLayout(1, SUMS))[:, None]
    q.store(total.to(q.dtype))  # nothing else reads these queries
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [first_row + group * ROWS, head * HEAD_DIM], q)
    tma.store_wait(0)


@gluon.jit
def _attend_blocks(begin, end, state, given, MASKED: gl.constexpr, WINDOW: gl.constexpr):
    """Attend to blocks [begin, end) before the newest one. The product of weights and values of a
    block runs beside the softmax of the next one.
    """
    total, p, best, weight = state
    q, stores, barriers, blocks, row, hidden, scale = given
    _, k_rows, v_rows = stores
    _, k_full, k_free, v_full, v_free = barriers
    num_blocks, last, shift = blocks
    ROWS_EACH: gl.constexpr = q.shape[0]
    HEAD_DIM: gl.constexpr = q.shape[1]
    STAGES: gl.constexpr = k_rows.shape[0]
    BLOCK_KEYS: gl.constexpr = k_rows.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    for j in range(begin, end):
        stage = j % STAGES
        newer = (j - 1) % STAGES
        zeros = gl.zeros([ROWS_EACH, BLOCK_KEYS], gl.float32, SCORES)
        k = k_rows.index(stage).permute((1, 0))
        s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(newer), ((j - 1) // STAGES) & 1)
        total = warpgroup_mma(p, v_rows.index(newer), total, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        mbarrier.arrive(k_free.index(stage), count=1)
        seen = (row, (last - j) * BLOCK_KEYS - shift, hidden)
        weights, best, weight, decay = _weigh(s, best, weight, scale, seen, SCORES, MASKED, WINDOW)
        # The assembler hoists a wait for products over arithmetic, but not over this loop.
        _wait_for_keys(k_full, j + 1, num_blocks, STAGES)
        total, p = warpgroup_mma_wait(num_outstanding=0, deps=(total, p))
        mbarrier.arrive(v_free.index(newer), count=1)
        total = total * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
        p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, SUMS, 2))
    return total, p, best, weight


@gluon.jit
def _wait_for_keys(k_full, j, num_blocks, STAGES: gl.constexpr):
    """Wait for the keys of a block, if there is one."""
    j = gl.minimum(j, num_blocks - 1)
    mbarrier.wait(k_full.index(j % STAGES), (j // STAGES) & 1)


@gluon.jit
def _weigh(
    s,
    best,
    weight,
    scale,
    seen,
    SCORES: gl.constexpr,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """One step of the softmax (Milakov & Gimelshein, 2018): weights of scores, the best score and
    the sum of weights so far, and by what earlier ones decay.
    """
    if MASKED:
        row, first_key, hidden = seen
        BLOCK_KEYS: gl.constexpr = s.shape[1]
        key = first_key + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, SCORES))
        ok = key[None, :] <= row[:, None]
        if WINDOW > 0:
            ok = ok & (key[None, :] > row[:, None] - WINDOW) & (key[None, :] >= hidden)
        s = gl.where(ok, s, float("-inf"))
    new_best = gl.maximum(best, gl.max(s, 1) * scale)
    decay = gl.exp2(best - new_best)
    weights = gl.exp2(s * scale - new_best[:, None])
    return weights, new_best, weight * decay + gl.sum(weights, 1), decay
