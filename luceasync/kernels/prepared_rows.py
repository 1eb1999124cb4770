"""Prepares rows of x for products (prepared_rows.cu): norms them, and arranges more than 8 of them
once for all programs, in the order in which lanes of tensor cores load them.

Owns that order, together with arranged_rows.cuh.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from luceasync.kernels.cuda_program import CudaProgram, LaunchShape
from luceasync.kernels.overlap import can_overlap
from luceasync.kernels.quant_decode import Coding
from luceasync.kernels.quant_tiles import BLOCK_COLUMNS, UNIT

MOST_PLAIN = 8  # more rows are arranged
ARRANGED_ROWS = 16  # rows are padded to so many
UNIT_COLUMNS = UNIT * BLOCK_COLUMNS
# Warps per program: a program that norms has a whole row.
PLAIN_WARPS, NORM_WARPS = 4, 16

SOURCE = Path(__file__).with_name("prepared_rows.cu")
_NORM = CudaProgram(SOURCE, "rms_norm")
_ARRANGE = CudaProgram(SOURCE, "arrange_rows")


class RmsNorm(Protocol):
    """An RMS norm, as luceasync.models.weights.InputNorm."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ArrangedRows:
    """9 to 16 rows of num_columns columns, arranged in whole units of 256 columns.

    columns: bfloat16 [lifts, units, blocks of 64, tiles of 8 rows, 2, lanes, 8 numbers], one copy
    for each of `lifts`; group_sums: bfloat16 [units, halves, tiles, lanes, 8 numbers], with one
    half if they are of whole groups, or None if no product wants them. arranged_rows.cuh defines
    which row and column each number is from.
    """

    num_rows: int
    num_columns: int
    lifts: tuple[int, ...]
    columns: Tensor
    group_sums: Tensor | None

    def __len__(self) -> int:
        return self.num_rows

    @property
    def num_halves(self) -> int:
        """1 if sums are of whole groups, 2 if of their halves."""
        return 1 if self.group_sums is None else self.group_sums.shape[1]

    def of(self, coding: Coding) -> Tensor:
        """The `columns` for products with a matrix of this coding."""
        return self.columns[self.lifts.index(lift_of(coding))]


def lift_of(coding: Coding) -> int:
    """The power of two that scales x: one of the lifts in lifts.cuh."""
    if coding.codes == "table":
        return 0
    return 2 if coding.bits < 8 and coding.codes in ("uint", "biased") else 1


def wants_sums(coding: Coding) -> bool:
    """Whether products subtract minimums for all groups of a unit at once: BY_UNIT in
    quant_layout.cuh.
    """
    is_alike = coding.group == 32 and coding.supergroup % UNIT_COLUMNS == 0
    has_both = coding.minimum == "own" and coding.has_small_minimums
    return is_alike and has_both and coding.codes != "biased" and coding.zero == 0


def room_for(x: Tensor, num_rows: int, num_columns: int, coding: Coding) -> ArrangedRows:
    """Allocate rows that the preceding product arranges for a matrix of this coding, 16 columns at
    a time, so that sums are of halves of groups. num_columns: a multiple of 256. `x` determines
    device and dtype.
    """
    assert MOST_PLAIN < num_rows <= ARRANGED_ROWS and num_columns % UNIT_COLUMNS == 0
    num_units = num_columns // UNIT_COLUMNS
    columns = x.new_empty(1, num_units, UNIT, 2, 2, 32, 8)
    group_sums = x.new_empty(num_units, 2, 2, 32, 8) if wants_sums(coding) else None
    return ArrangedRows(num_rows, num_columns, (lift_of(coding),), columns, group_sums)


def room_for_rows(
    x: Tensor, num_rows: int, num_columns: int, codings: Collection[Coding]
) -> ArrangedRows:
    """Allocate rows that a kernel arranges for matrices of all these codings, unit by unit.
    num_columns: a multiple of 64. `x` determines device and dtype.
    """
    assert MOST_PLAIN < num_rows <= ARRANGED_ROWS and num_columns % BLOCK_COLUMNS == 0
    lifts = tuple(sorted({lift_of(coding) for coding in codings}))
    num_units = -(-num_columns // UNIT_COLUMNS)
    columns = x.new_empty(len(lifts), num_units, UNIT, 2, 2, 32, 8)
    has_sums = any(wants_sums(coding) for coding in codings)
    group_sums = x.new_empty(num_units, 1, 2, 32, 8) if has_sums else None
    return ArrangedRows(num_rows, num_columns, lifts, columns, group_sums)


def prepared(
    x: Tensor, codings: Collection[Coding], norm: RmsNorm | None = None
) -> Tensor | ArrangedRows:
    """Prepare rows, normed if `norm` is given, once for matrices of all these codings."""
    x = x.contiguous()
    assert len(x) <= ARRANGED_ROWS and x.dtype == torch.bfloat16, "few rows of bfloat16"
    if len(x) > MOST_PLAIN:
        return arrange(x, codings, norm)
    return x if norm is None else rms_norm(x, norm)


def rms_norm(x: Tensor, norm: RmsNorm) -> Tensor:
    """Norm rows, one program each: within a product every program would wait for the same norm. x:
    bfloat16 [rows, columns], contiguous.
    """
    out = torch.empty_like(x)
    overlaps = can_overlap(x.device.index or 0)
    constants = constants_of(x.shape[1], NORM_WARPS, overlaps=overlaps)
    launch = LaunchShape(len(x), NORM_WARPS * 32)
    _NORM.launch(x.device, constants, launch, (x, norm.weight, out, norm.eps))
    return out


def arrange(x: Tensor, codings: Collection[Coding], norm: RmsNorm | None = None) -> ArrangedRows:
    """Arrange rows for products with matrices of these codings; `norm` is applied if given. x:
    bfloat16 [9 to 16, columns], contiguous, columns a multiple of 64.
    """
    num_rows, num_columns = x.shape
    out = room_for_rows(x, num_rows, num_columns, codings)
    # to norm a row, one program needs all of it
    is_normed = norm is not None
    warps = NORM_WARPS if is_normed else PLAIN_WARPS
    programs_of_row = 1 if is_normed else -(-len(out.columns[0]) // warps)
    constants = constants_of(
        num_columns if is_normed else 0,
        warps,
        overlaps=can_overlap(x.device.index or 0),
        lifts=out.lifts,
        has_sums=out.group_sums is not None,
    )
    launch = LaunchShape(ARRANGED_ROWS * programs_of_row, warps * 32)
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    arguments = (x, weight, out.columns, out.group_sums, eps, num_rows, num_columns)
    _ARRANGE.launch(x.device, constants, launch, arguments)
    return out


def constants_of(
    norm: int,
    warps: int,
    *,
    overlaps: bool,
    lifts: tuple[int, ...] = (),
    has_sums: bool = False,
) -> dict[str, int]:
    """The constants that a program is compiled with; `norm`: the columns of a normed row, else
    0.
    """
    return {
        "NORM": norm,
        "OVERLAP": int(overlaps),
        "WARPS": warps,
        "LIFTS": sum(1 << lift for lift in lifts),
        "SUMS": int(has_sums),
    }
