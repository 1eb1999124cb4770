"""Rows of x before products of several rows take them (prepared_rows.cu): normed, and more than 8
arranged once for all programs, as lanes of tensor cores load them.

Owns how arranged rows lie, with arranged_rows.cuh.
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

MOST_PLAIN = 8  # rows that products take as they are
ARRANGED_ROWS = 16  # as many as there are room for
UNIT_COLUMNS = UNIT * BLOCK_COLUMNS
# Warps of a program: one that norms has a whole row.
PLAIN_WARPS, NORM_WARPS = 4, 16

SOURCE = Path(__file__).with_name("prepared_rows.cu")
_NORM = CudaProgram(SOURCE, "rms_norm")
_ARRANGE = CudaProgram(SOURCE, "arrange_rows")


class RmsNorm(Protocol):
    """See luceasync.models.weights.InputNorm."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ArrangedRows:
    """9 to 16 rows of num_columns columns, in whole units of 256 columns.

    columns: bfloat16 [lifts, units, blocks of 64, tiles of 8 rows, 2, lanes, 8 numbers], for each
    of `lifts` one after the other; group_sums: bfloat16 [units, halves, tiles, lanes, 8 numbers],
    one half where they are of whole groups, or None if no product wants them. arranged_rows.cuh
    says which row and column a number is of.
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
        """Of groups, which have a sum each."""
        return 1 if self.group_sums is None else self.group_sums.shape[1]

    def of(self, coding: Coding) -> Tensor:
        """`columns`, as products with a matrix of this coding want them."""
        return self.columns[self.lifts.index(lift_of(coding))]


def lift_of(coding: Coding) -> int:
    """By which powers of two rows of x are taken times: one of prepared_rows.cu's lifts."""
    if coding.codes == "table":
        return 0
    return 2 if coding.bits < 8 and coding.codes in ("uint", "biased") else 1


def wants_sums(coding: Coding) -> bool:
    """Whether products take minimums off for all groups of a unit at once: BY_UNIT in
    quant_layout.cuh.
    """
    is_alike = coding.group == 32 and coding.supergroup % UNIT_COLUMNS == 0
    has_both = coding.minimum == "own" and coding.has_small_minimums
    return is_alike and has_both and coding.codes != "biased" and coding.zero == 0


def room_for(x: Tensor, num_rows: int, num_columns: int, coding: Coding) -> ArrangedRows:
    """For products with a matrix of this coding: rows that the product in front arranges, 16
    columns at a time, so that sums are of halves of groups. num_columns: a multiple of 256; `x`
    says where.
    """
    assert MOST_PLAIN < num_rows <= ARRANGED_ROWS and num_columns % UNIT_COLUMNS == 0
    num_units = num_columns // UNIT_COLUMNS
    columns = x.new_empty(1, num_units, UNIT, 2, 2, 32, 8)
    group_sums = x.new_empty(num_units, 2, 2, 32, 8) if wants_sums(coding) else None
    return ArrangedRows(num_rows, num_columns, (lift_of(coding),), columns, group_sums)


def prepared(
    x: Tensor, codings: Collection[Coding], norm: RmsNorm | None = None
) -> Tensor | ArrangedRows:
    """What products with matrices of these codings take, made once for all of them: the rows, as
    `norm` has them if one is given.
    """
    x = x.contiguous()
    assert len(x) <= ARRANGED_ROWS and x.dtype == torch.bfloat16, "few rows of bfloat16"
    if len(x) > MOST_PLAIN:
        return arrange(x, codings, norm)
    return x if norm is None else rms_norm(x, norm)


def rms_norm(x: Tensor, norm: RmsNorm) -> Tensor:
    """Each row by a program of its own: in a product every program would wait for the same norm.
    x: bfloat16 [rows, columns], contiguous.
    """
    out = torch.empty_like(x)
    overlaps = can_overlap(x.device.index or 0)
    constants = constants_of(x.shape[1], NORM_WARPS, overlaps=overlaps)
    launch = LaunchShape(len(x), NORM_WARPS * 32)
    _NORM.launch(x.device, constants, launch, (x, norm.weight, out, norm.eps))
    return out


def arrange(x: Tensor, codings: Collection[Coding], norm: RmsNorm | None = None) -> ArrangedRows:
    """Rows for products with matrices of these codings, as `rms_norm` has them if a norm is given.
    x: bfloat16 [9 to 16, columns], contiguous, columns a multiple of 64.
    """
    num_rows, num_columns = x.shape
    assert MOST_PLAIN < num_rows <= ARRANGED_ROWS and num_columns % BLOCK_COLUMNS == 0
    lifts = tuple(sorted({lift_of(coding) for coding in codings}))
    num_units = -(-num_columns // UNIT_COLUMNS)
    columns = x.new_empty(len(lifts), num_units, UNIT, 2, 2, 32, 8)
    has_sums = any(wants_sums(coding) for coding in codings)
    group_sums = x.new_empty(num_units, 1, 2, 32, 8) if has_sums else None
    # A row that is normed is one program's: each of its numbers wants all of them.
    is_normed = norm is not None
    warps = NORM_WARPS if is_normed else PLAIN_WARPS
    programs_of_row = 1 if is_normed else -(-num_units // warps)
    constants = constants_of(
        num_columns if is_normed else 0,
        warps,
        overlaps=can_overlap(x.device.index or 0),
        lifts=lifts,
        has_sums=has_sums,
    )
    launch = LaunchShape(ARRANGED_ROWS * programs_of_row, warps * 32)
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    arguments = (x, weight, columns, group_sums, eps, num_rows, num_columns)
    _ARRANGE.launch(x.device, constants, launch, arguments)
    return ArrangedRows(num_rows, num_columns, lifts, columns, group_sums)


def constants_of(
    norm: int,
    warps: int,
    *,
    overlaps: bool,
    lifts: tuple[int, ...] = (),
    has_sums: bool = False,
) -> dict[str, int]:
    """What a program is compiled with; `norm`: columns of a row that is normed, else 0."""
    return {
        "NORM": norm,
        "OVERLAP": int(overlaps),
        "WARPS": warps,
        "LIFTS": sum(1 << lift for lift in lifts),
        "SUMS": int(has_sums),
    }
