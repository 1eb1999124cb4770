"""Products of up to 64 rows with a quantised matrix, bound by the bandwidth of reading its codes.

Codes are multiplied unscaled, which is exact in the dtype of x; the float32 sum of each group is
scaled afterwards, so no weight is rounded. Residual and SwiGLU are fused in. The bits of a row do
not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from luceasync.kernels.overlap import overlap_options
from luceasync.kernels.quant_decode import Coding
from luceasync.kernels.quant_gemv_kernel import quant_gemv_kernel, sum_parts_kernel
from luceasync.kernels.quant_tiles import BLOCK_ROWS, TiledMatrix

MAX_ROWS = 64
SUM_BLOCK = 1024  # results that a program sums


@dataclass(frozen=True, slots=True)
class QuantTile:
    """What a program processes: `row_blocks` of 16 weight rows (of gate and up together) by
    `strides` stretches of columns, one per warp, in steps of `steps` blocks of 64. `num_splits`
    programs divide the columns among them. `prefetch`: request all codes of a program at once.
    """

    row_blocks: int
    strides: int
    steps: int
    num_splits: int = 1
    prefetch: bool = False


WIDE, SMALL = 8192, 4096  # outputs: an H200 has 132 multiprocessors
# By bits of a code: tiles for paired, wide, other and small weights. STEP: up to 8 rows; VERIFY: up
# to 16; MANY: more.
STEP = {
    4: (QuantTile(2, 4, 2), QuantTile(2, 4, 2), QuantTile(1, 4, 4), QuantTile(2, 8, 4)),
    5: (QuantTile(2, 4, 2), QuantTile(1, 4, 4), QuantTile(1, 4, 4), QuantTile(1, 8, 2)),
    6: (QuantTile(2, 4, 1), QuantTile(1, 4, 2), QuantTile(1, 8, 2), QuantTile(1, 8, 2)),
    8: (QuantTile(2, 4, 1), QuantTile(1, 4, 2), QuantTile(1, 4, 2), QuantTile(2, 8, 2)),
}
VERIFY = {
    4: (QuantTile(2, 4, 1), QuantTile(2, 4, 1), QuantTile(1, 4, 2), QuantTile(2, 8, 2)),
    5: (QuantTile(2, 4, 1), QuantTile(2, 4, 1), QuantTile(1, 4, 2), QuantTile(1, 8, 2)),
    6: (QuantTile(2, 4, 1), QuantTile(2, 4, 1), QuantTile(1, 4, 2), QuantTile(1, 8, 4)),
    8: (QuantTile(2, 4, 1), QuantTile(2, 4, 1), QuantTile(1, 4, 1), QuantTile(2, 8, 2)),
}
MANY = (QuantTile(2, 4, 1), QuantTile(2, 4, 1), QuantTile(1, 4, 1), QuantTile(1, 8, 1))


def linear(
    x: Tensor,
    weight: TiledMatrix,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    chosen: QuantTile | None = None,
) -> Tensor:
    """x @ weight^T (+ residual).

    x: [rows <= MAX_ROWS, columns], bfloat16; residual: [rows, outputs]. Returns [rows, outputs] in
    `dtype`, by default that of x. `chosen` replaces `tile`.
    """
    out = x.new_empty(x.shape[0], weight.num_rows, dtype=dtype)
    return _product(x, weight, residual, out, chosen, paired=False)


def swiglu(x: Tensor, gate_up: TiledMatrix, *, chosen: QuantTile | None = None) -> Tensor:
    """silu(gate) * up. x: [rows, columns]; gate_up: [2 * inner, columns], gate first, inner a
    multiple of 16. -> [rows, inner].
    """
    out = x.new_empty(x.shape[0], gate_up.num_rows // 2)
    return _product(x, gate_up, None, out, chosen, paired=True)


def _product(
    x: Tensor,
    weight: TiledMatrix,
    residual: Tensor | None,
    out: Tensor,
    chosen: QuantTile | None,
    *,
    paired: bool,
) -> Tensor:
    num_rows = x.shape[0]
    assert num_rows <= MAX_ROWS, "few rows"
    num_outputs = weight.num_rows // (2 if paired else 1)
    padded_rows = padded(num_rows, x.is_cuda and torch.version.hip is None)
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    chosen = chosen or tile(weight.coding, num_outputs, padded_rows, paired=paired)
    if chosen.num_splits == 1:
        _launch(x, weight, residual, out, chosen, padded_rows, paired=paired)
        return out
    width = num_outputs * (2 if paired else 1)
    parts = out.new_empty(chosen.num_splits, num_rows, width, dtype=torch.float32)
    _launch(x, weight, None, parts, chosen, padded_rows, paired=paired)
    sum_parts_kernel[(triton.cdiv(num_outputs, SUM_BLOCK), num_rows)](
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
    """`num_rows` padded for a launch: NVIDIA's tensor cores take 8 at a time, others 16."""
    return max(8 if has_small_tiles else 16, int(triton.next_power_of_2(num_rows)))


def tile(coding: Coding, num_outputs: int, padded_rows: int, *, paired: bool) -> QuantTile:
    """The tile for a weight of `num_outputs` rows (twice that if paired): the fastest of a sweep
    over shapes of 4B and 27B models on an H200 (scripts/tune_quantised.py at 8162231), rounded to
    a rule.
    """
    shape = 0 if paired else 1 if num_outputs >= WIDE else 3 if num_outputs <= SMALL else 2
    if padded_rows > 16:
        return MANY[shape]
    return (STEP if padded_rows <= 8 else VERIFY)[coding.bits][shape]


def _launch(
    x: Tensor,
    weight: TiledMatrix,
    residual: Tensor | None,
    out: Tensor,
    chosen: QuantTile,
    padded_rows: int,
    *,
    paired: bool,
) -> None:
    """out: [rows, outputs], or float32 [splits, rows, outputs (twice that if paired)]."""
    num_rows = x.shape[0]
    num_outputs = weight.num_rows // (2 if paired else 1)
    num_row_blocks = num_outputs // BLOCK_ROWS
    num_blocks = weight.num_blocks
    step = chosen.steps * chosen.strides
    own_blocks = chosen.row_blocks // 2 if paired else chosen.row_blocks
    quant_gemv_kernel[(triton.cdiv(num_row_blocks, own_blocks), chosen.num_splits)](
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
        weight.num_supergroups,
        weight.num_groups,
        PAIRED=paired,
        EVEN=num_blocks % (step * chosen.num_splits) == 0,
        ROWS=padded_rows,
        WIDTH=8 if x.is_cuda and torch.version.hip is None else 16,
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
