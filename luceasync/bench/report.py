"""What was measured, as it comes: a Markdown table for people, a JSON line a row for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure as a program reads it, in its unit, and as a person does."""

    value: float | str | None
    text: str


def ms(seconds: float, digits: int = 1) -> Cell:
    return figure(seconds * 1e3, "ms", digits)


def figure(value: float, unit: str = "", digits: int = 2) -> Cell:
    """A number with its unit."""
    return Cell(value, f"{value:.{digits}f} {unit}".rstrip())


def share(value: float) -> Cell:
    """A part of 1, shown in percent."""
    return Cell(value, f"{value:.0%}")


NOTHING = Cell(None, "")


class Table:
    """Rows of cells; text and whole numbers may stand for themselves. Its head is printed with the
    first row, each row when it is added.
    """

    def __init__(self, report: Report, columns: Sequence[str], title: str) -> None:
        assert len(set(columns)) == len(columns), f"two columns of one name: {columns}"
        self._report = report
        self._columns = tuple(columns)
        self._title = title
        self._is_begun = False

    def add(self, *row: Cell | str | int) -> None:
        """Show and keep a row."""
        cells = [cell if isinstance(cell, Cell) else Cell(cell, str(cell)) for cell in row]
        if not self._is_begun:
            self._is_begun = True
            self._report.say(f"\n{self._title}\n" if self._title else "")
            self._report.say(_line(self._columns) + "\n" + "|---" * len(self._columns) + "|")
        self._report.say(_line([cell.text for cell in cells]))
        values = {c: cell.value for c, cell in zip(self._columns, cells, strict=True)}
        self._report.keep({"table": self._title, **values})


class Report:
    """All that one run says; `path`: where its JSON lines go, if anywhere."""

    def __init__(self, machine: Mapping[str, object], path: Path | None = None) -> None:
        """`machine`: what it was measured on, the first thing that is said."""
        self._path = path
        if path is not None:
            path.write_text("", encoding="utf-8")
        self.say(", ".join(f"{name} {value}" for name, value in machine.items()))
        self.keep({"machine": dict(machine)})

    def table(self, columns: Sequence[str], title: str = "") -> Table:
        """A table to add rows to."""
        return Table(self, columns, title)

    def say(self, text: str) -> None:
        """For people only."""
        print(text, flush=True)

    def keep(self, fields: Mapping[str, object]) -> None:
        """For programs only."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
