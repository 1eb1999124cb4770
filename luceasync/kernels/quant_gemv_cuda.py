"""Products of up to 16 rows with a quantised matrix on NVIDIA GPUs, by quant_gemv.cu, which copies
far ahead of its products. For up to 8 rows, the bits of a row do not depend on the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from luceasync.kernels.cuda_program import CudaProgram, LaunchShape, can_compile
from luceasync.kernels.overlap import can_overlap, num_multiprocessors, shared_bytes
from luceasync.kernels.prepared_rows import (
    ARRANGED_ROWS,
    MOST_PLAIN,
    UNIT_COLUMNS,
    ArrangedRows,
    RmsNorm,
    prepared,
    room_for,
    wants_sums,
)
from luceasync.kernels.quant_decode import Coding
from luceasync.kernels.quant_tiles import BLOCK_COLUMNS, BLOCK_ROWS, UNIT, TiledMatrix
from luceasync.kernels.quant_tiling import (
    QuantSplit,
    QuantWork,
    choose_split,
    num_programs,
    shared_of,
)

MAX_ROWS = ARRANGED_ROWS
STATIC_BYTES = 1024  # of shared memory besides those of a split

_CODES = {"uint": 0, "biased": 1, "e4m3": 2, "e2m1": 3, "table": 4}
_SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.uint8: 3}
_SMALL = {"none": 0, "uint8": 1, "int8": 2, "e4m3": 3}
_MINIMUM = {"none": 0, "own": 1, "scale": 2}

SOURCE = Path(__file__).with_name("quant_gemv.cu")
_PRODUCT = CudaProgram(SOURCE, "quant_gemv")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How results are written: as rows of `dtype`, or arranged for the next product, scaled by a
    power of two (see prepared_rows.lift_of), optionally with sums of groups.
    """

    dtype: torch.dtype = torch.bfloat16
    lift: int = -1
    has_sums: bool = False


@dataclass(frozen=True, slots=True)
class GemvOutput:
    """Where results go: `rows` [rows, outputs], which may be strided, or the columns and sums of
    arranged rows.
    """

    kept: OutputFormat
    rows: Tensor
    sums: Tensor | None = None

    @staticmethod
    def of_rows(out: Tensor) -> GemvOutput:
        return GemvOutput(OutputFormat(out.dtype), out)

    @staticmethod
    def of_arranged(out: ArrangedRows) -> GemvOutput:
        kept = OutputFormat(lift=out.lifts[0], has_sums=out.group_sums is not None)
        return GemvOutput(kept, out.columns, out.group_sums)


def can_multiply(x: Tensor) -> bool:
    """Whether the program supports the rows, dtype and device of `x`."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or len(x) > MAX_ROWS:
        return False
    return can_compile(x.device.index or 0)


def linear(
    x: Tensor | ArrangedRows,
    weight: TiledMatrix,
    residual: Tensor | None = None,
    *,
    norm: RmsNorm | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    beside: bool = False,
    chosen: QuantSplit | None = None,
) -> Tensor:
    """norm(x) @ weight^T (+ residual); without a norm, x itself.

    x: bfloat16 [rows <= MAX_ROWS, columns], or the result of `prepared`, then without a norm;
    residual: [rows, outputs]. Returns [rows, outputs] in `dtype`, by default that of x, in `out` if
    given, whose rows may be strided. `beside`: the preceding kernel is a product of the same x,
    which this one need not wait for. `chosen` replaces `choose_split`.
    """
    if out is None:
        out = _empty(x, weight.num_rows, dtype)
    given, results = _prepared(x, weight, norm), GemvOutput.of_rows(out)
    _product(given, weight, residual, results, chosen, paired=False, beside=beside)
    return out


def swiglu(
    x: Tensor | ArrangedRows,
    gate_up: TiledMatrix,
    *,
    norm: RmsNorm | None = None,
    dtype: torch.dtype | None = None,
    chosen: QuantSplit | None = None,
) -> Tensor:
    """silu(gate) * up of norm(x). x, norm: as in `linear`; gate_up:
    [2 * inner, columns], gate first, inner a multiple of 16. -> [rows, inner].
    """
    out = _empty(x, gate_up.num_rows // 2, dtype)
    results = GemvOutput.of_rows(out)
    _product(_prepared(x, gate_up, norm), gate_up, None, results, chosen, paired=True)
    return out


def swiglu_for(
    x: Tensor,
    gate_up: TiledMatrix,
    coding: Coding,
    *,
    norm: RmsNorm | None = None,
    chosen: QuantSplit | None = None,
) -> Tensor | ArrangedRows:
    """`swiglu`, prepared for a matrix of this coding: more than 8 rows come out arranged."""
    num_inner = gate_up.num_rows // 2
    if len(x) <= MOST_PLAIN or num_inner % UNIT_COLUMNS != 0:
        return swiglu(x, gate_up, norm=norm, chosen=chosen)
    out = room_for(x, len(x), num_inner, coding)
    results = GemvOutput.of_arranged(out)
    _product(_prepared(x, gate_up, norm), gate_up, None, results, chosen, paired=True)
    return out


def constants_of(
    work: QuantWork,
    split: QuantSplit,
    *,
    overlaps: bool,
    has_residual: bool = False,
    beside: bool = False,
    num_halves: int = 1,
    kept: OutputFormat = OutputFormat(),
) -> dict[str, int]:
    """The constants that a program is compiled with; num_halves: that of arranged rows."""
    coding = work.coding
    table = coding.table or (0, 0, 0, 0)
    return {
        "BITS": coding.bits,
        "CODES": _CODES[coding.codes],
        "ZERO": coding.zero,
        "GROUP": coding.group,
        "SUPERGROUP": coding.supergroup,
        "SCALE": _SCALES[work.scales],
        "SMALL": _SMALL[coding.small],
        "MINIMUM": _MINIMUM[coding.minimum],
        "SMALL_MINIMUMS": int(coding.has_small_minimums),
        "DIVIDES": int(coding.divides),
        **{f"TABLE_{i}": word & 0xFFFFFFFF for i, word in enumerate(table)},
        "X_ROWS": work.x_rows,
        "SUM_HALVES": num_halves,
        "ROW_BLOCKS": split.row_blocks,
        "WARPS": split.warps,
        "STAGES": split.stages,
        "GOES_ON": int(split.goes_on),
        "PAIRED": int(work.paired),
        "RESIDUAL": int(has_residual),
        "FLOAT_OUT": int(kept.dtype == torch.float32),
        "OUT_LIFT": kept.lift,
        "OUT_SUMS": int(kept.has_sums),
        "OVERLAP": int(overlaps),
        "BESIDE": int(beside),
        "RAGGED": int(work.num_columns % (UNIT * BLOCK_COLUMNS) != 0),
        "SPLITS": split.splits,
        "SHARED_BYTES": shared_of(work, split),
    }


def _empty(x: Tensor | ArrangedRows, width: int, dtype: torch.dtype | None) -> Tensor:
    like = x.columns if isinstance(x, ArrangedRows) else x
    return like.new_empty(len(x), width, dtype=dtype)


def _prepared(
    x: Tensor | ArrangedRows, weight: TiledMatrix, norm: RmsNorm | None
) -> Tensor | ArrangedRows:
    return prepared(x, (weight.coding,), norm) if isinstance(x, Tensor) else x


def _product(
    x: Tensor | ArrangedRows,
    weight: TiledMatrix,
    residual: Tensor | None,
    results: GemvOutput,
    chosen: QuantSplit | None,
    *,
    paired: bool,
    beside: bool = False,
) -> None:
    num_rows, group_sums, num_halves = len(x), None, 1
    if isinstance(x, ArrangedRows) and wants_sums(weight.coding):
        group_sums, num_halves = x.group_sums, x.num_halves
    if isinstance(x, ArrangedRows):
        x = x.of(weight.coding)
    work = QuantWork(
        weight.coding,
        weight.scales.dtype,
        weight.num_rows // (2 if paired else 1),
        weight.num_columns,
        1 if num_rows == 1 else MOST_PLAIN if num_rows <= MOST_PLAIN else ARRANGED_ROWS,
        paired,
    )
    overlaps = can_overlap(x.device.index or 0)  # such GPUs have clusters, too
    chosen = chosen or choose_split(work, shared_bytes(x) - STATIC_BYTES, has_clusters=overlaps)
    constants = constants_of(
        work,
        chosen,
        overlaps=overlaps,
        has_residual=residual is not None,
        beside=beside,
        num_halves=num_halves,
        kept=results.kept,
    )
    num_row_blocks = work.num_outputs // BLOCK_ROWS
    arguments = (
        x,
        group_sums,
        weight.codes,
        weight.planes,
        weight.scales,
        weight.small_scales,
        weight.minimums,
        weight.small_minimums,
        None if residual is None else residual.contiguous(),
        results.rows,
        results.sums,
        num_rows,
        num_row_blocks,
        weight.num_blocks,
        weight.num_supergroups,
        weight.num_groups,
        results.rows.stride(0),
    )
    grid = num_programs(work, chosen, num_multiprocessors(x))
    launch = LaunchShape(grid, chosen.warps * 32, constants["SHARED_BYTES"], chosen.splits)
    _PRODUCT.launch(x.device, constants, launch, arguments)
