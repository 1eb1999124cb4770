"""The tensors of a quantised matrix, as shapes and bytes. Pure.

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
# M: it does not exist; it has its own tensor beside D; or it is D, and m is a zero point.
Minimum = Literal["none", "own", "scale"]

ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "e8m0": 1, "uint8": 1, "int8": 1, "e4m3": 1}
BLOCK = 32  # columns whose low code bits share 16 bytes


@dataclass(frozen=True, slots=True)
class Component:
    """One tensor of a quantised matrix, [rows, *shape] of type `kind`."""

    name: str
    shape: Shape
    kind: str

    def num_bytes(self, num_rows: int) -> int:
        """The size of `num_rows` rows."""
        return num_rows * prod(self.shape) * ITEM_BYTES[self.kind]


@dataclass(frozen=True, slots=True)
class QuantLayout:
    """How numbers w = (D s) c - (M m) are stored.

    c is the stored code minus `zero`, or the entry of `table` at that code, or an int8 or e4m3
    number. s and m belong to `group` columns, D and M to `supergroup` columns, a multiple of it;
    None: to the whole row. Without `small`, s is 1; with `has_small_minimums`, m is uint8.
    `divides`: the scale is s / D. `name`: what the source calls this type.
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
        """The tensors of a matrix of `num_columns`, in the order of the fields of Packed."""
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
        """The number of groups in a row."""
        return -(-num_columns // (self.group or num_columns))

    def with_supergroups_within(self, num_columns: int) -> Self:
        """The layout with super-groups that do not cross multiples of `num_columns` columns."""
        if self.supergroup is None:
            return self
        return replace(self, supergroup=gcd(self.supergroup, num_columns))

    def fault_of(self, num_columns: int) -> str:
        """Why rows of `num_columns` cannot have this layout; "" if they can."""
        if self.bits < 8 and num_columns % BLOCK:
            return f"expected rows of a multiple of {BLOCK} numbers, got {num_columns}"
        return ""
