"""Processes that a test has started, any of which may end while the test looks at them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests.later import otherwise

SAID_S = 120.0


def children(word: str = "", of: int | None = None) -> list[psutil.Process]:
    """Processes below `of` (None: this one) that have `word` in their command."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(of).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                if any(word in each for each in child.cmdline()):
                    found.append(child)
    return found


def runs(pid: int) -> bool:
    """Whether the process runs. One that waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def line_with(
    word: str, process: subprocess.Popen[str], kill: Callable[[], None] | None = None
) -> str:
    """The first line with `word` that the process writes to its stderr, within SAID_S; after that
    `kill`, by default of the process alone, has to close the pipe. Raises AssertionError with what
    it has written instead.
    """
    assert process.stderr is not None
    lines: list[str] = []
    with otherwise(SAID_S, kill or process.kill):
        for line in process.stderr:
            lines.append(line)
            if word in line:
                return line
    raise AssertionError(f"no {word!r} in what it said: {''.join(lines)}")


def url_of(process: subprocess.Popen[str]) -> str:
    """Where a server that was just started listens."""
    found = re.search(r"https?://[\d.]+:\d+", line_with("Listening on", process))
    assert found is not None
    return found[0]
