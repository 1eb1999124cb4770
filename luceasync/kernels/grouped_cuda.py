"""Products of up to 16 rows with a quantised matrix on GPUs of NVIDIA's: grouped_rows.cu, whose
copies are on their way long before they are multiplied.

Decides how the work is divided. A row is the same bits among up to 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from luceasync.kernels.cuda_program import Launch, Program, can_compile
from luceasync.kernels.grouped_codes import Coding, num_parts
from luceasync.kernels.grouped_tiled import BLOCK_COLUMNS, BLOCK_ROWS, Tiled
from luceasync.kernels.overlap import can_overlap, shared_bytes

MAX_ROWS = 16
UNIT = 4  # blocks that a warp takes at a time
STATIC_BYTES = 1024  # of shared memory that are not for a Share
NORM_THREADS = 128  # of a row that is normed; every program has as many
WIDE, SMALL = 8192, 4096  # outputs, where an H200's 132 multiprocessors want another share
HUGE = 32768
LONG = 6144  # columns

_CODES = {"uint": 0, "biased": 1, "e4m3": 2, "e2m1": 3, "table": 4}
_SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.uint8: 3}
_SMALL = {"none": 0, "uint8": 1, "int8": 2, "e4m3": 3}
_MINIMUM = {"none": 0, "own": 1, "scale": 2}

SOURCE = Path(__file__).with_name("grouped_rows.cu")
_PRODUCT = Program(SOURCE, "grouped_rows")
_NORM = Program(SOURCE, "rms_norm")


class RowNorm(Protocol):
    """See luceasync.models.weights.RowNorm."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Share:
    """What a program takes: `row_blocks` of 16 weight rows (of gate and up together), whose columns
    are divided among `splits` programs of `warps` each; `stages` of 256 columns, the one that is
    multiplied counted in, are in shared memory.
    """

    row_blocks: int
    warps: int
    stages: int
    splits: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """What is multiplied: `x_rows` rows of x (1, 8 or 16), the first of which is normed by the
    program itself where `norm` is its number of columns, with a matrix [num_outputs (twice that if
    paired), num_columns]; `scales`: the dtype of its scales.
    """

    coding: Coding
    scales: torch.dtype
    num_outputs: int
    num_columns: int
    x_rows: int
    paired: bool
    norm: int = 0


def can_multiply(x: Tensor) -> bool:
    """Whether `x` has few enough rows, of the dtype and on a device that the program is for."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or len(x) > MAX_ROWS:
        return False
    return can_compile(x.device.index or 0)


def linear(
    x: Tensor,
    weight: Tiled,
    residual: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    chosen: Share | None = None,
) -> Tensor:
    """x @ weight^T (+ residual), of x as `norm` has it if one is given.

    x: bfloat16 [rows <= MAX_ROWS, columns]; residual: [rows, outputs]. Returns [rows, outputs] in
    `dtype`, that of x unless it is named; in `out` if it is given, whose rows may lie apart.
    `chosen` replaces `share`.
    """
    if out is None:
        out = x.new_empty(len(x), weight.num_rows, dtype=dtype)
    return _product(x, weight, residual, norm, out, chosen, paired=False)


def swiglu(
    x: Tensor,
    gate_up: Tiled,
    *,
    norm: RowNorm | None = None,
    dtype: torch.dtype | None = None,
    chosen: Share | None = None,
) -> Tensor:
    """silu(gate) * up, of x as `norm` has it if one is given. x: [rows, columns]; gate_up:
    [2 * inner, columns], gate first, inner a multiple of 16. -> [rows, inner].
    """
    out = x.new_empty(len(x), gate_up.num_rows // 2, dtype=dtype)
    return _product(x, gate_up, None, norm, out, chosen, paired=True)


def rms_norm(x: Tensor, norm: RowNorm) -> Tensor:
    """As a product of one row norms it, bit by bit. x: bfloat16 [rows, columns], contiguous."""
    out = torch.empty_like(x)
    work = Work(_ANY_FORM, torch.float16, BLOCK_ROWS, x.shape[1], 1, False, norm=x.shape[1])
    share = Share(1, NORM_THREADS // 32, 2)
    constants = constants_of(work, share, overlaps=can_overlap(x.device.index or 0))
    launch = Launch(len(x), NORM_THREADS)
    _NORM.launch(x.device, constants, launch, (x, norm.weight, out, norm.eps))
    return out


def share(work: Work, most_bytes: int, *, has_clusters: bool = False) -> Share:
    """How a product is divided on a device whose programs may have `most_bytes` of shared memory,
    and may have clusters: the fastest of a sweep over shapes of 4B and 27B models on an H200
    (scripts/tune_quantised.py), rounded to a rule. Up to 8 rows `warps`, and with them a row's
    bits, do not depend on `x_rows`.
    """
    wanted = _many_rows(work, has_clusters) if work.x_rows > 8 else _few_rows(work)
    return next(each for each in _smaller(wanted, work) if shared_of(work, each) <= most_bytes)


def _few_rows(work: Work) -> Share:
    num_units = -(-work.num_columns // (UNIT * BLOCK_COLUMNS))
    if work.paired or work.num_outputs >= HUGE:
        return Share(2, 5 if work.paired and num_units >= 20 else 4, 2)
    if work.coding.bits == 8:
        return Share(1, 5, 2) if num_units <= 10 else Share(1, 6, 3)
    if num_units <= 10 or work.num_outputs >= WIDE:
        return Share(1, 4, 3)
    if work.num_outputs >= SMALL:
        return Share(1, 8, 2)
    return Share(1, 10, 4) if num_units >= 32 else Share(1, 8, 3)


def _many_rows(work: Work, has_clusters: bool) -> Share:
    bits, num_columns = work.coding.bits, work.num_columns
    if work.paired:
        return Share(2, 3, 3) if bits < 8 else Share(2, 2, 2)
    if work.num_outputs >= HUGE:
        return Share(2, 2, 2)
    if work.num_outputs >= WIDE:
        return Share(1, 3, 2) if bits in (5, 6) else Share(2, 4, 2)
    if work.num_outputs < SMALL // 2:
        return Share(1, 8, 3)
    if has_clusters and work.num_outputs >= SMALL and num_columns >= LONG:
        return Share(1, 3, 2, splits=2) if bits in (5, 6) else Share(2, 4, 2, splits=2)
    return Share(2, 8 if num_columns > 10 * UNIT * BLOCK_COLUMNS else 6, 2)


def _smaller(share: Share, work: Work) -> Iterator[Share]:
    """It, and what wants less memory, for cards that have less than an H200."""
    yield share
    while share.stages > 2:
        yield (share := replace(share, stages=share.stages - 1))
    least = NORM_THREADS // 32 if work.norm else 1
    while share.warps > least:
        yield (share := replace(share, warps=share.warps - 1))


def shared_of(work: Work, share: Share) -> int:
    """Bytes of shared memory of a program; grouped_rows.cu says what they are for."""
    coding, scale_bytes = work.coding, work.scales.itemsize
    parts: int = num_parts(coding.group)
    code_bytes = UNIT * (1024 if coding.bits == 8 else 512)
    plane_bytes = UNIT // 2 * 32 * {5: 8, 6: 16}.get(coding.bits, 0)
    each = coding.supergroup in (16, 32)
    is_alike = not each and coding.supergroup // BLOCK_COLUMNS % UNIT == 0
    num_supers = UNIT * parts if each else 1 if is_alike else UNIT
    num_chunks = UNIT * parts * ((coding.small != "none") + coding.has_small_minimums)
    num_chunks += num_supers * scale_bytes * (2 if coding.minimum == "own" else 1)
    stage_bytes = share.row_blocks * (code_bytes + plane_bytes + 16 * num_chunks)
    if work.x_rows == 1 and not work.norm:
        stage_bytes += UNIT * BLOCK_COLUMNS * 2
    width = share.row_blocks * BLOCK_ROWS
    sum_bytes = width * 4 if work.x_rows == 1 else work.x_rows * (width + 4) * 4
    unit_columns = UNIT * BLOCK_COLUMNS
    row_bytes = -(-work.norm // unit_columns) * unit_columns * 2
    return share.warps * max(share.stages * stage_bytes, sum_bytes) + row_bytes


def constants_of(
    work: Work,
    share: Share,
    *,
    overlaps: bool,
    has_residual: bool = False,
    out: torch.dtype = torch.bfloat16,
) -> dict[str, int]:
    """What a program is compiled with."""
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
        "ROW_BLOCKS": share.row_blocks,
        "WARPS": share.warps,
        "STAGES": share.stages,
        "PAIRED": int(work.paired),
        "RESIDUAL": int(has_residual),
        "FLOAT_OUT": int(out == torch.float32),
        "NORM": work.norm,
        "OVERLAP": int(overlaps),
        "RAGGED": int(work.num_columns % (UNIT * BLOCK_COLUMNS) != 0),
        "SPLITS": share.splits,
        "SHARED_BYTES": shared_of(work, share),
    }


def _product(
    x: Tensor,
    weight: Tiled,
    residual: Tensor | None,
    norm: RowNorm | None,
    out: Tensor,
    chosen: Share | None,
    *,
    paired: bool,
) -> Tensor:
    x = x.contiguous()
    num_rows, num_columns = x.shape
    assert num_rows <= MAX_ROWS and x.dtype == torch.bfloat16, "few rows of bfloat16"
    if norm is not None and num_rows > 1:
        x, norm = rms_norm(x, norm), None
    work = Work(
        weight.coding,
        weight.scales.dtype,
        weight.num_rows // (2 if paired else 1),
        num_columns,
        1 if num_rows == 1 else 8 if num_rows <= 8 else 16,
        paired,
        norm=0 if norm is None else num_columns,
    )
    overlaps = can_overlap(x.device.index or 0)  # GPUs that can have clusters too
    chosen = chosen or share(work, shared_bytes(x) - STATIC_BYTES, has_clusters=overlaps)
    constants = constants_of(
        work,
        chosen,
        overlaps=overlaps,
        has_residual=residual is not None,
        out=out.dtype,
    )
    num_row_blocks = work.num_outputs // BLOCK_ROWS
    own_blocks = chosen.row_blocks // (2 if paired else 1)
    arguments = (
        x,
        weight.codes,
        weight.planes,
        weight.scales,
        weight.small_scales,
        weight.minimums,
        weight.small_minimums,
        None if residual is None else residual.contiguous(),
        None if norm is None else norm.weight,
        out,
        0.0 if norm is None else norm.eps,
        num_rows,
        num_row_blocks,
        weight.num_blocks,
        weight.num_supergroups,
        weight.num_groups,
        out.stride(0),
    )
    grid = -(-num_row_blocks // own_blocks) * chosen.splits
    launch = Launch(grid, chosen.warps * 32, constants["SHARED_BYTES"], chosen.splits)
    _PRODUCT.launch(x.device, constants, launch, arguments)
    return out


_ANY_FORM = Coding(8, "biased", 0, 32, 32, False, "none", "none", False, False)
