"""Orders of rows and columns that a converter has changed, and how they are changed back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """From `begin` on, rows (or columns) are stored as `shape`, three numbers; two neighbouring
    axes, `axis` and the one behind it, are to be swapped.
    """

    begin: int
    shape: tuple[int, int, int]
    axis: int


@dataclass(frozen=True, slots=True)
class Orders:
    """Of the rows and the columns of one matrix; None: they are as they should be."""

    rows: Order | None = None
    columns: Order | None = None


AS_STORED = Orders()
