"""Command lines of the checks: flags that several have, and lists as their values."""

from __future__ import annotations

import argparse
import inspect
import os
from pathlib import Path

from luceasync.bench.report import Report


def parser(doc: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with `--json`. `doc`: the program's docstring, shown by --help; `rounds`: the
    default of `--rounds`, for programs that have it.
    """
    made = argparse.ArgumentParser(
        description=inspect.cleandoc(doc or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, metavar="PATH", help="also write each row as JSON there")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help=f"default: {rounds}")
    return made


def numbers(text: str) -> list[int]:
    """The type of a flag such as --tokens 10,8192."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """The type of a flag such as --kinds chain,tree."""
    return text.split(",")


def open_report(options: argparse.Namespace) -> Report:
    """The report of a run on this machine's CPU."""
    return Report({"cores": os.cpu_count()}, options.json)
