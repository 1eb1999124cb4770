"""What quantised weights are made of, as shapes and bytes. Pure.

The layout is a contract with the kernels that multiply from it: docs/quantised.md draws it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Literal, Self

Shape = tuple[int, ...]
Real = Literal["fp16", "bf16", "fp32", "e8m0"]  # of D and M
Small = Literal["uint8", "int8", "e4m3"]  # of s
Codes = Literal["uint", "int8", "e4m3"]
# Where M is: nowhere; beside D; or it is D itself, and m a zero point.
Minimum = Literal["none", "own", "scale"]

ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "e8m0": 1, "uint8": 1, "int8": 1, "e4m3": 1}
BLOCK = 32  # columns whose low halves of codes lie together, in 16 bytes


@dataclass(frozen=True, slots=True)
class Component:
    """One tensor of a quantised matrix: rows first, then `shape`, of `kind`; so many of its numbers
    belong to `columns` columns.
    """

    name: str
    shape: Shape
    kind: str

    def num_bytes(self, num_rows: int) -> int:
        """Of so many rows."""
        return num_rows * prod(self.shape) * ITEM_BYTES[self.kind]


@dataclass(frozen=True, slots=True)
class QuantLayout:
    """Numbers w = (D s) c - (M m).

    c is the stored code less `zero`, the entry of `table` that it numbers, an int8 or an e4m3
    number. s and m belong to `group` columns, D and M to `supergroup`, a multiple of it; None: to
    the whole row. Without `small` there are no s (they are 1); with `has_small_minimums` there are
    m, uint8. `divides`: D is what s is divided by. `name`: what the source calls it.
    """

    name: str
    bits: Literal[4, 5, 6, 8]
    group: int | None
    supergroup: int | None
    scale: Real
    small: Small | None = None
    minimum: Minimum = "none"
    has_small_minimums: bool = False
    zero: int = 0
    codes: Codes = "uint"
    table: tuple[int, ...] = ()
    divides: bool = False

    def components(self, num_columns: int) -> tuple[Component, ...]:
        """The tensors of a matrix with so many columns, in the order of Packed's fields."""
        groups = (self.num_groups(num_columns),)
        supergroups = (-(-num_columns // (self.supergroup or num_columns)),)
        found = []
        if self.bits == 8:
            kind = "uint8" if self.codes == "uint" else self.codes
            found.append(Component("codes", (num_columns,), kind))
        else:
            found.append(Component("codes", (num_columns // 2,), "uint8"))
        found.append(Component("scales", supergroups, self.scale))
        if 4 < self.bits < 8:
            found.append(Component("planes", (self.bits - 4, num_columns // 8), "uint8"))
        if self.small:
            found.append(Component("small_scales", groups, self.small))
        if self.minimum == "own":
            found.append(Component("minimums", supergroups, self.scale))
        if self.has_small_minimums:
            found.append(Component("small_minimums", groups, "uint8"))
        return tuple(found)

    def num_groups(self, num_columns: int) -> int:
        """Of each row."""
        return -(-num_columns // (self.group or num_columns))

    def with_supergroups_within(self, num_columns: int) -> Self:
        """The same numbers, where no super-group reaches over a multiple of so many columns."""
        if self.supergroup is None:
            return self
        return replace(self, supergroup=gcd(self.supergroup, num_columns))

    def fault_of(self, num_columns: int) -> str:
        """Why rows of so many columns cannot be held so; "" where they can."""
        if self.bits < 8 and num_columns % BLOCK:
            return f"rows of a multiple of {BLOCK} numbers are expected, got {num_columns}"
        return ""
