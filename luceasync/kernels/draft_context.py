"""Write a drafter's context to its rings: the keys of all layers normed and rotated, values
unchanged, each at the place of its position.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.attention import normed_and_rotated
from luceasync.kernels.draft_rows import DraftRowTensors
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

BLOCK_ROWS = 16  # rows of one head per program


def write_context(
    projected: Tensor,
    norms: tuple[Tensor, float],
    layers: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: DraftRowTensors,
    counts: Tensor,
) -> None:
    """Write the first `counts` rows of each entry to the rings of `layers`; if a ring holds
    fewer rows, only the last of them.

    projected: [entries, rows, all layers * 2 * kv_dim] contiguous, for each layer keys, then
    values; norms: weight float32 [all layers, head_dim], eps; layers: int64 [some of them]; keys,
    values: [these layers, lanes, capacity, kv_heads, head_dim], whose places are contiguous:
    position p is at p % capacity; counts: int32 or int64 [entries].
    """
    num_entries, num_rows, width = projected.shape
    num_layers, _, capacity, num_kv_heads, head_dim = keys.shape
    weight, eps = norms
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), num_layers * 2 * num_kv_heads, num_entries)
    _write_context_kernel[grid](
        projected,
        weight,
        layers,
        keys,
        values,
        rows.lanes,
        rows.positions,
        counts,
        *rows.rotation,
        eps,
        num_rows,
        width,
        keys.stride(0),
        keys.stride(1),
        capacity,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK_ROWS=BLOCK_ROWS,
        num_warps=4,
        **overlap_options(projected),
    )


@kernel(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["counts"])
def _write_context_kernel(
    projected,
    norm,
    layers,
    keys,
    values,
    lanes,
    positions,
    counts,
    cos,
    sin,
    eps,
    num_rows,
    width,
    layer_stride,
    lane_stride,
    capacity,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    index = tl.program_id(1) // (2 * NUM_KV_HEADS)
    head = tl.program_id(1) % (2 * NUM_KV_HEADS)  # key heads, then value heads
    entry = tl.program_id(2)
    start_next(OVERLAP)
    layer = tl.load(layers + index)
    wait_for_inputs(OVERLAP)
    lane = tl.load(lanes + entry)
    if lane < 0:
        return
    end = tl.load(positions + entry * num_rows) + tl.load(counts + entry).to(tl.int32)
    t = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row = entry.to(tl.int64) * num_rows + t
    position = tl.load(positions + row, mask=t < num_rows, other=end)
    stays = (position < end) & (position >= end - capacity)
    d = tl.arange(0, BLOCK_DIM)[None, :]
    ok = stays & (d < HEAD_DIM)
    HALF: tl.constexpr = HEAD_DIM // 2
    offset = row * width + (layer * 2 * NUM_KV_HEADS + head) * HEAD_DIM
    place = index.to(tl.int64) * layer_stride + lane.to(tl.int64) * lane_stride
    place += (position % capacity).to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM) + d
    if head < NUM_KV_HEADS:
        k = normed_and_rotated(
            projected,
            offset,
            stays,
            d,
            norm + layer * HEAD_DIM,
            cos + row * HALF,
            sin + row * HALF,
            eps,
            HEAD_DIM,
            HALF,
        )
        tl.store(keys + place + head * HEAD_DIM, k, mask=ok)
    else:
        v = tl.load(projected + offset + d, mask=ok, other=0.0)
        tl.store(values + place + (head - NUM_KV_HEADS) * HEAD_DIM, v, mask=ok)
