"""Processes that a test has started, any of which may end while the test looks at them."""

from __future__ import annotations

from contextlib import suppress

import psutil


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
