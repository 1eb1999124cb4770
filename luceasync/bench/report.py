"""How measurements are taken and shown: alternating variants, medians and ratios, tables.

Independent of devices and models. Results go to the terminal as a Markdown table, or as JSON lines.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

Run = Callable[[], Any]
Clock = Callable[[Run], float]  # seconds of one run


# --- variants in turns ----------------------------------------------------------------------------


def interleave(
    variants: Mapping[str, Callable[[], T]], num_rounds: int, *, num_warmups: int = 1
) -> dict[str, list[T]]:
    """Run the variants in turn, so that other load on the machine affects all of them alike.

    Returns the results of each variant, round by round, without the first `num_warmups` rounds.
    Every other round runs in reverse order, so that a variant does not always follow the same one.
    """
    found: dict[str, list[T]] = {name: [] for name in variants}
    for number in range(num_warmups + num_rounds):
        names = list(variants) if number % 2 == 0 else list(variants)[::-1]
        for name in names:
            result = variants[name]()
            if number >= num_warmups:
                found[name].append(result)
    return found


def wall(run: Run) -> float:
    """Seconds of one run by wall time."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(
    variants: Mapping[str, Run], num_rounds: int, *, num_warmups: int = 1, clock: Clock = wall
) -> dict[str, list[float]]:
    """Seconds of each variant in each round, as `interleave` orders them."""
    timed = {name: _timed(run, clock) for name, run in variants.items()}
    return interleave(timed, num_rounds, num_warmups=num_warmups)


def _timed(run: Run, clock: Clock) -> Callable[[], float]:
    return lambda: clock(run)


# --- statistics -----------------------------------------------------------------------------------


def median(samples: Sequence[float]) -> float:
    """The middle sample."""
    return statistics.median(samples)


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each variant."""
    return {name: median(values) for name, values in samples.items()}


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample at that percentile; 100 is the largest one."""
    ordered = sorted(samples)
    return ordered[int(percent / 100 * (len(ordered) - 1))]


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(samples, n=4, method="inclusive")
    return (third - first) / middle


def pair_ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Each sample over that of the same round: changes from round to round cancel out."""
    return [one / other for one, other in zip(samples, base, strict=True)]


def paired_ratio(samples: Sequence[float], base: Sequence[float]) -> float:
    """Median of `pair_ratios`."""
    return median(pair_ratios(samples, base))


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """A value for programs, in its unit, and its text for readers."""

    value: float | str | None
    text: str


NOTHING = Cell(None, "")


def figure(value: float, unit: str = "", digits: int = 2) -> Cell:
    """A number with its unit."""
    return Cell(value, f"{value:.{digits}f} {unit}".rstrip())


def ms(seconds: float, digits: int = 1) -> Cell:
    """Seconds, shown in milliseconds."""
    return figure(seconds * 1e3, "ms", digits)


def us(seconds: float, digits: int = 1) -> Cell:
    """Seconds, shown in microseconds."""
    return figure(seconds * 1e6, "us", digits)


def share(value: float) -> Cell:
    """A fraction of 1, shown in percent."""
    return Cell(value, f"{value:.0%}")


class BenchTable:
    """Rows of cells; text and whole numbers are shown unchanged. The head is printed with the first
    row, and each row as soon as it is added.
    """

    def __init__(self, report: Report, columns: Sequence[str], title: str) -> None:
        assert len(set(columns)) == len(columns), f"two columns of one name: {columns}"
        self._report = report
        self._columns = tuple(columns)
        self._title = title
        self._has_head = False

    def add(self, *row: Cell | str | int) -> None:
        """Show a row."""
        cells = [cell if isinstance(cell, Cell) else Cell(cell, str(cell)) for cell in row]
        values = {c: cell.value for c, cell in zip(self._columns, cells, strict=True)}
        if not self._has_head:
            self._has_head = True
            self._report.say(f"\n{self._title}\n" if self._title else "")
            self._report.say(_line(self._columns) + "\n" + "|---" * len(self._columns) + "|")
        self._report.say(_line([cell.text for cell in cells]))
        self._report.keep({"table": self._title, **values})


class Report:
    """The output of one run.

    `path` is a file for JSON lines. `is_json`: print JSON lines instead of tables.
    """

    def __init__(
        self, machine: Mapping[str, object], path: Path | None = None, *, is_json: bool = False
    ) -> None:
        """Start with a line about the `machine`."""
        self._path = path
        self._is_json = is_json
        if path is not None:
            path.write_text("", encoding="utf-8")
        self.say(", ".join(f"{name} {value}" for name, value in machine.items()))
        self.keep({"machine": dict(machine)})

    def table(self, columns: Sequence[str], title: str = "") -> BenchTable:
        """A table to add rows to. Column names must be unique."""
        return BenchTable(self, columns, title)

    def say(self, text: str) -> None:
        """Print text for readers."""
        if not self._is_json:
            print(text, flush=True)

    def keep(self, fields: Mapping[str, object]) -> None:
        """Write a JSON line for programs."""
        if self._is_json:
            print(json.dumps(fields), flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
