"""Prepares rows of x for products (prepared_rows.cu): weighs up to 8 of them for a norm; norms and
arranges more once for all programs, in the order in which lanes of tensor cores load them.

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
from luceasync.kernels.quant_tiles import BLOCK_COLUMNS, BLOCK_ROWS, UNIT

MOST_FEW = 8  # more rows are scaled when they are arranged
ARRANGED_ROWS = 16  # rows are padded to multiples of it
MOST_ARRANGED = 64
UNIT_COLUMNS = UNIT * BLOCK_COLUMNS
# Warps per program: a program that norms has a whole row.
PLAIN_WARPS, NORM_WARPS = 4, 16

SOURCE = Path(__file__).with_name("prepared_rows.cu")
_WEIGH = CudaProgram(SOURCE, "weigh_rows")
_ARRANGE_FEW = CudaProgram(SOURCE, "arrange_few")
_ARRANGE = CudaProgram(SOURCE, "arrange_rows")


class RmsNorm(Protocol):
    """An RMS norm, as luceasync.models.weights.InputNorm."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ArrangedRows:
    """9 to 64 rows of num_columns columns, arranged in sixteens and whole units of 256 columns.

    columns: bfloat16 [lifts, sixteens, units, blocks of 64, tiles of 8 rows, 2, lanes, 8 numbers],
    one copy for each of `lifts`; group_sums: bfloat16 [sixteens, units, halves, tiles, lanes, 8
    numbers], with one half if they are of whole groups, or None if no product wants them.
    arranged_rows.cuh defines which row and column each number is from.
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
        return 1 if self.group_sums is None else self.group_sums.shape[2]

    def part(self, begin: int, end: int) -> ArrangedRows:
        """Rows [begin, end); `begin` is a multiple of 16."""
        sixteens = slice(begin // ARRANGED_ROWS, num_sixteens(end))
        sums = None if self.group_sums is None else self.group_sums[sixteens]
        num_rows, columns = min(end, self.num_rows) - begin, self.columns[:, sixteens]
        return ArrangedRows(num_rows, self.num_columns, self.lifts, columns, sums)

    def of(self, coding: Coding) -> Tensor:
        """The `columns` for products with a matrix of this coding."""
        return self.columns[self.lifts.index(lift_of(coding))]


@dataclass(frozen=True, slots=True)
class FewRows:
    """2 to 8 rows of num_columns columns, arranged but not scaled.

    columns: bfloat16 [blocks of 64, 2, lanes, 8 numbers]; arranged_rows.cuh defines which row and
    column each number is from. Rows past the last may be anything.
    """

    num_rows: int
    num_columns: int
    columns: Tensor

    def __len__(self) -> int:
        return self.num_rows


@dataclass(frozen=True, slots=True)
class WeighedRows:
    """Up to 8 rows times the weights of an RMS norm, still to be divided by their root mean
    squares: products multiply their results instead.

    rows: of one row bfloat16 [1, columns], of several arranged; squares: float32 [rows, columns /
    16], sums of the squares of 16 columns, without the weights.
    """

    rows: Tensor | FewRows
    squares: Tensor
    eps: float

    def __len__(self) -> int:
        return len(self.squares)

    @property
    def numbers(self) -> Tensor:
        """The tensor that holds the rows."""
        return self.rows.columns if isinstance(self.rows, FewRows) else self.rows


# Rows as products take them; a tensor has one, as it is.
PreparedRows = Tensor | FewRows | ArrangedRows | WeighedRows


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


def num_sixteens(num_rows: int) -> int:
    """How many times ARRANGED_ROWS rows are arranged."""
    return -(-num_rows // ARRANGED_ROWS)


def room_for_few(x: Tensor, num_rows: int, num_columns: int) -> FewRows:
    """Allocate 2 to 8 rows that a kernel arranges. num_columns: a multiple of 64. `x` determines
    device and dtype.
    """
    assert 1 < num_rows <= MOST_FEW and num_columns % BLOCK_COLUMNS == 0
    columns = x.new_empty(num_columns // BLOCK_COLUMNS, 2, 32, 8)
    return FewRows(num_rows, num_columns, columns)


def room_for_weighed(x: Tensor, num_rows: int, num_columns: int, eps: float) -> WeighedRows:
    """Allocate up to 8 rows that a kernel weighs. num_columns: a multiple of 64. `x` determines
    device and dtype.
    """
    squares = x.new_empty(num_rows, num_columns // BLOCK_ROWS, dtype=torch.float32)
    if num_rows == 1:
        return WeighedRows(x.new_empty(1, num_columns), squares, eps)
    return WeighedRows(room_for_few(x, num_rows, num_columns), squares, eps)


def room_for(x: Tensor, num_rows: int, num_columns: int, coding: Coding) -> ArrangedRows:
    """Allocate rows that the preceding product arranges for a matrix of this coding, 16 columns at
    a time, so that sums are of halves of groups. num_columns: a multiple of 256. `x` determines
    device and dtype.
    """
    assert MOST_FEW < num_rows <= MOST_ARRANGED and num_columns % UNIT_COLUMNS == 0
    units = (num_sixteens(num_rows), num_columns // UNIT_COLUMNS)
    columns = x.new_empty(1, *units, UNIT, 2, 2, 32, 8)
    group_sums = x.new_empty(*units, 2, 2, 32, 8) if wants_sums(coding) else None
    return ArrangedRows(num_rows, num_columns, (lift_of(coding),), columns, group_sums)


def room_for_rows(
    x: Tensor, num_rows: int, num_columns: int, codings: Collection[Coding]
) -> ArrangedRows:
    """Allocate rows that a kernel arranges for matrices of all these codings, unit by unit.
    num_columns: a multiple of 64. `x` determines device and dtype.
    """
    assert MOST_FEW < num_rows <= MOST_ARRANGED and num_columns % BLOCK_COLUMNS == 0
    lifts = tuple(sorted({lift_of(coding) for coding in codings}))
    units = (num_sixteens(num_rows), -(-num_columns // UNIT_COLUMNS))
    columns = x.new_empty(len(lifts), *units, UNIT, 2, 2, 32, 8)
    has_sums = any(wants_sums(coding) for coding in codings)
    group_sums = x.new_empty(*units, 1, 2, 32, 8) if has_sums else None
    return ArrangedRows(num_rows, num_columns, lifts, columns, group_sums)


def prepared(x: Tensor, codings: Collection[Coding], norm: RmsNorm | None = None) -> PreparedRows:
    """Prepare rows, normed if `norm` is given, once for matrices of all these codings."""
    x = x.contiguous()
    assert len(x) <= MOST_ARRANGED and x.dtype == torch.bfloat16, "few rows of bfloat16"
    if len(x) > MOST_FEW:
        return arrange(x, codings, norm)
    if norm is not None:
        return weigh(x, norm)
    return x if len(x) == 1 else arrange_few(x)


def weigh(x: Tensor, norm: RmsNorm) -> WeighedRows:
    """Weigh rows as a product before them would: within a product every program would wait for the
    same norm. x: bfloat16 [rows, columns], contiguous, columns a multiple of 64.
    """
    num_rows, num_columns = x.shape
    out = room_for_weighed(x, num_rows, num_columns, norm.eps)
    overlaps = can_overlap(x.device.index or 0)
    constants = constants_of(0, PLAIN_WARPS, overlaps=overlaps, few=num_rows > 1)
    programs_of_row = -(-num_columns // (PLAIN_WARPS * UNIT_COLUMNS))
    launch = LaunchShape(num_rows * programs_of_row, PLAIN_WARPS * 32)
    arguments = (x, norm.weight, out.numbers, out.squares, num_columns)
    _WEIGH.launch(x.device, constants, launch, arguments)
    return out


def arrange_few(x: Tensor) -> FewRows:
    """Arrange rows as they are. x: bfloat16 [2 to 8, columns], contiguous, columns a multiple of
    64.
    """
    num_rows, num_columns = x.shape
    out = room_for_few(x, num_rows, num_columns)
    constants = constants_of(0, PLAIN_WARPS, overlaps=can_overlap(x.device.index or 0))
    programs_of_row = -(-num_columns // (PLAIN_WARPS * UNIT_COLUMNS))
    launch = LaunchShape(num_rows * programs_of_row, PLAIN_WARPS * 32)
    _ARRANGE_FEW.launch(x.device, constants, launch, (x, out.columns, num_columns))
    return out


def arrange(x: Tensor, codings: Collection[Coding], norm: RmsNorm | None = None) -> ArrangedRows:
    """Arrange rows for products with matrices of these codings; `norm` is applied if given. x:
    bfloat16 [9 to 64, columns], contiguous, columns a multiple of 64.
    """
    num_rows, num_columns = x.shape
    out = room_for_rows(x, num_rows, num_columns, codings)
    # to norm a row, one program needs all of it
    is_normed = norm is not None
    warps = NORM_WARPS if is_normed else PLAIN_WARPS
    programs_of_row = 1 if is_normed else -(-out.columns.shape[2] // warps)
    constants = constants_of(
        num_columns if is_normed else 0,
        warps,
        overlaps=can_overlap(x.device.index or 0),
        lifts=out.lifts,
        has_sums=out.group_sums is not None,
    )
    launch = LaunchShape(num_sixteens(num_rows) * ARRANGED_ROWS * programs_of_row, warps * 32)
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
    few: bool = False,
) -> dict[str, int]:
    """The constants that a program is compiled with; `norm`: the columns of a normed row, else 0;
    `few`: whether weighed rows are arranged.
    """
    return {
        "NORM": norm,
        "OVERLAP": int(overlaps),
        "WARPS": warps,
        "LIFTS": sum(1 << lift for lift in lifts),
        "SUMS": int(has_sums),
        "FEW": int(few),
    }
