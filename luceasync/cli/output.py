"""Formatting and output of commands: sizes, ages, errors, JSON, and a progress bar while a model
loads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

UNBROKEN_COLUMNS = 10_000
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def size_text(num_bytes: int) -> str:
    """A number of bytes in binary units: `1536` -> "1.5 KiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def age_text(seconds: float) -> str:
    """A coarse age: `7300` -> "2 h ago"."""
    if seconds < MINUTE_S:
        return "now"
    if seconds < HOUR_S:
        return f"{seconds // MINUTE_S:.0f} min ago"
    if seconds < 2 * DAY_S:
        return f"{seconds // HOUR_S:.0f} h ago"
    return f"{seconds // DAY_S:.0f} days ago"


def one_line(text: object) -> str:
    """An error as one line: `"a\nb"` -> "a\\nb". Escapes everything that a terminal might
    interpret, since the text may contain names from a client or a file.
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))


def plain_table(*columns: str, names: Collection[str] = ()) -> Table:
    """A table without lines; columns of `names` are left-aligned, others right-aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in names else "right", no_wrap=True)
    return table


def print_plain(*objects: object) -> None:
    """Print text and tables without line breaks: a pipe has no width, and a terminal wraps."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True, width=UNBROKEN_COLUMNS)
    for each in objects:
        console.print(each)


def count_text(number: int, noun: str) -> str:
    """A number of things: `1, "file"` -> "1 file", `2, "file"` -> "2 files"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_json(value: object) -> None:
    """Print `value` as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


class LoadingBar:
    """A progress bar of bytes on a terminal, nothing elsewhere. `advance` is thread-safe."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("Loading", total=None)

    def start(self) -> None:
        self._progress.start()
        # A signal may end the process without restoring a hidden cursor.
        self._progress.console.show_cursor(True)

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        self._progress.update(self._task, completed=bytes_done, total=bytes_total)

    def stop(self) -> None:
        self._progress.stop()


@contextmanager
def loading_bar(console: Console) -> Iterator[LoadingBar]:
    """A bar that is removed when the block is left in any way."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    bar = LoadingBar(progress)
    try:
        yield bar
    finally:
        bar.stop()
