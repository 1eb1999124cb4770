"""The command line of a measurement: flags that all have, and one line where it cannot run."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from luceasync.bench.report import Report


def parser(
    doc: str | None, *, rounds: int | None = None, device: str | None = None
) -> argparse.ArgumentParser:
    """`doc`: of the script, shown by --help; `rounds` and `device`: defaults of flags that some
    have.
    """
    made = argparse.ArgumentParser(
        description=inspect.cleandoc(doc or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, metavar="PATH", help="also write each row as JSON there")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="samples of each variant")
    if device is not None:
        made.add_argument("--device", default=device, help=f"default: {device}")
    return made


def numbers(text: str) -> list[int]:
    """The type of a flag such as --lanes 1,4."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """The type of a flag such as --shapes a,b."""
    return text.split(",")


def begin(options: argparse.Namespace, devices: Sequence[str] = ("cpu:0",)) -> Report:
    """The report of a run on these devices. Ends the process with a line if one is missing."""
    from luceasync.bench.device import describe
    from luceasync.errors import PlacementError
    from luceasync.pipeline.devices import find_devices

    try:
        find_devices(devices, "--device")
    except PlacementError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None
    return Report(describe(devices), options.json)
