"""Products of up to 16 rows with a quantised matrix on NVIDIA GPUs, by quant_gemv.cu, which copies
far ahead of its products. For up to 8 rows, the bits of a row do not depend on the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from luceasync.kernels.cuda_program import CudaProgram, LaunchShape, can_compile
from luceasync.kernels.overlap import can_overlap, num_multiprocessors, shared_bytes
from luceasync.kernels.prepared_rows import (
    ARRANGED_ROWS,
    MOST_ARRANGED,
    MOST_FEW,
    UNIT_COLUMNS,
    ArrangedRows,
    FewRows,
    PreparedRows,
    RmsNorm,
    WeighedRows,
    num_sixteens,
    prepared,
    room_for,
    room_for_few,
    room_for_weighed,
    wants_sums,
)
from luceasync.kernels.quant_decode import Coding
from luceasync.kernels.quant_tiles import BLOCK_COLUMNS, BLOCK_ROWS, UNIT, TiledMatrix
from luceasync.kernels.quant_tiling import (
    QuantSplit,
    QuantWork,
    choose_split,
    most_warps,
    num_programs,
    shared_of,
)

MAX_ROWS = MOST_ARRANGED
AT_ONCE = 32  # rows of a launch
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
    power of two (see prepared_rows.lift_of), optionally with sums of groups. `few`: as
    prepared_rows.FewRows; `weighs`: also as WeighedRows.
    """

    dtype: torch.dtype = torch.bfloat16
    lift: int = -1
    has_sums: bool = False
    weighs: bool = False
    few: bool = False


@dataclass(frozen=True, slots=True)
class GemvOutput:
    """Where results go: `rows` [rows, outputs], which may be strided, or the columns and sums of
    arranged rows; `weighed`: the weights of the next norm, and where weighed rows go.
    """

    kept: OutputFormat
    rows: Tensor
    sums: Tensor | None = None
    weighed: tuple[Tensor, WeighedRows] | None = None

    @staticmethod
    def of_rows(out: Tensor) -> GemvOutput:
        return GemvOutput(OutputFormat(out.dtype), out)

    @staticmethod
    def of_arranged(out: ArrangedRows) -> GemvOutput:
        kept = OutputFormat(lift=out.lifts[0], has_sums=out.group_sums is not None)
        return GemvOutput(kept, out.columns, out.group_sums)

    @staticmethod
    def of_few(out: FewRows) -> GemvOutput:
        return GemvOutput(OutputFormat(few=True), out.columns)

    def part(self, begin: int, end: int) -> GemvOutput:
        """Rows [begin, end); `begin` is a multiple of 16."""
        if self.kept.lift < 0:
            return replace(self, rows=self.rows[begin:end])
        sixteens = slice(begin // ARRANGED_ROWS, num_sixteens(end))
        sums = None if self.sums is None else self.sums[sixteens]
        return replace(self, rows=self.rows[:, sixteens], sums=sums)


def can_multiply(x: Tensor) -> bool:
    """Whether the program supports the rows, dtype and device of `x`."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or len(x) > MAX_ROWS:
        return False
    return can_compile(x.device.index or 0)


def linear(
    x: PreparedRows,
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

    x: bfloat16 [rows <= MAX_ROWS, columns], or prepared rows, then without a norm;
    residual: [rows, outputs]. Returns [rows, outputs] in `dtype`, by default that of x, in `out` if
    given, whose rows may be strided. `beside`: the preceding kernel is a product of the same x,
    which this one need not wait for. `chosen` replaces `choose_split`.
    """
    if out is None:
        out = _empty(x, weight.num_rows, dtype)
    given, results = _prepared(x, weight, norm), GemvOutput.of_rows(out)
    _product(given, weight, residual, results, chosen, paired=False, beside=beside)
    return out


def linear_weighed(
    x: Tensor | FewRows,
    weight: TiledMatrix,
    residual: Tensor,
    norm: RmsNorm,
    *,
    chosen: QuantSplit | None = None,
) -> tuple[Tensor, WeighedRows]:
    """`linear` of up to 8 rows, and its result weighed for the norm that comes next."""
    out = _empty(x, weight.num_rows, None)
    weighed = room_for_weighed(out, len(x), weight.num_rows, norm.eps)
    results = GemvOutput(OutputFormat(out.dtype, weighs=True), out, None, (norm.weight, weighed))
    _product(_prepared(x, weight, None), weight, residual, results, chosen, paired=False)
    return out, weighed


def swiglu(
    x: PreparedRows,
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
    x: PreparedRows,
    gate_up: TiledMatrix,
    coding: Coding,
    *,
    norm: RmsNorm | None = None,
    chosen: QuantSplit | None = None,
) -> Tensor | FewRows | ArrangedRows:
    """`swiglu`, prepared for a matrix of this coding: several rows come out arranged."""
    num_inner, like = gate_up.num_rows // 2, _tensor_of(x)
    out: FewRows | ArrangedRows
    if 1 < len(x) <= MOST_FEW and num_inner % BLOCK_COLUMNS == 0:
        out = room_for_few(like, len(x), num_inner)
        results = GemvOutput.of_few(out)
    elif len(x) > MOST_FEW and num_inner % UNIT_COLUMNS == 0:
        out = room_for(like, len(x), num_inner, coding)
        results = GemvOutput.of_arranged(out)
    else:
        return swiglu(x, gate_up, norm=norm, chosen=chosen)
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
        "MOST_WARPS": most_warps(work, split),
        "SUM_HALVES": num_halves,
        "ROW_BLOCKS": split.row_blocks,
        "WARPS": split.warps,
        "STAGES": split.stages,
        "GOES_ON": int(split.goes_on),
        "X_AHEAD": split.ahead,
        "PAIRED": int(work.paired),
        "RESIDUAL": int(has_residual),
        "FLOAT_OUT": int(kept.dtype == torch.float32),
        "OUT_LIFT": kept.lift,
        "OUT_SUMS": int(kept.has_sums),
        "OUT_FEW": int(kept.few),
        "UNDIVIDED": int(work.is_undivided),
        "WEIGHS": int(kept.weighs),
        "OVERLAP": int(overlaps),
        "BESIDE": int(beside),
        "RAGGED": int(work.num_columns % (UNIT * BLOCK_COLUMNS) != 0),
        "SPLITS": split.splits,
        "SHARED_BYTES": shared_of(work, split),
    }


def _empty(x: PreparedRows, width: int, dtype: torch.dtype | None) -> Tensor:
    return _tensor_of(x).new_empty(len(x), width, dtype=dtype)


def _tensor_of(x: PreparedRows) -> Tensor:
    """A tensor on the device, and with the dtype, of `x`."""
    if isinstance(x, WeighedRows):
        return x.numbers
    return x if isinstance(x, Tensor) else x.columns


def _prepared(x: PreparedRows, weight: TiledMatrix, norm: RmsNorm | None) -> PreparedRows:
    return prepared(x, (weight.coding,), norm) if isinstance(x, Tensor) else x


def _product(
    x: PreparedRows,
    weight: TiledMatrix,
    residual: Tensor | None,
    results: GemvOutput,
    chosen: QuantSplit | None,
    *,
    paired: bool,
    beside: bool = False,
) -> None:
    if isinstance(x, ArrangedRows) and len(x) > AT_ONCE:
        for begin in range(0, len(x), AT_ONCE):
            end = min(begin + AT_ONCE, len(x))
            added = None if residual is None else residual[begin:end]
            part = x.part(begin, end), weight, added, results.part(begin, end)
            _product(*part, chosen, paired=paired, beside=beside or begin > 0)
        return
    num_rows, group_sums, num_halves = len(x), None, 1
    squares, eps = None, 0.0
    if isinstance(x, WeighedRows):
        squares, eps = x.squares, x.eps
        x = x.rows
    if isinstance(x, ArrangedRows) and wants_sums(weight.coding):
        group_sums, num_halves = x.group_sums, x.num_halves
    x_rows = MOST_FEW if num_rows > 1 else 1  # of the program
    if isinstance(x, FewRows):
        x = x.columns
    if isinstance(x, ArrangedRows):
        x, x_rows = x.of(weight.coding), num_sixteens(num_rows) * ARRANGED_ROWS
    work = QuantWork(
        weight.coding,
        weight.scales.dtype,
        weight.num_rows // (2 if paired else 1),
        weight.num_columns,
        x_rows,
        paired,
        squares is not None,
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
    next_weight, weighed = results.weighed or (None, None)
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
        squares,
        eps,
        next_weight,
        None if weighed is None else weighed.numbers,
        None if weighed is None else weighed.squares,
    )
    grid = num_programs(work, chosen, num_multiprocessors(x))
    launch = LaunchShape(grid, chosen.warps * 32, constants["SHARED_BYTES"], chosen.splits)
    _PRODUCT.launch(x.device, constants, launch, arguments)
