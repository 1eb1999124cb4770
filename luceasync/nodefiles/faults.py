"""What is wrong with a disk, by the kind of work that fails: one that succeeds excuses no other.

Owns the words of the last faults. Pure.
"""

from __future__ import annotations

from typing import Literal

Work = Literal["read", "write", "scan", "upkeep"]


class Faults:
    """The faults of work that has not succeeded since."""

    def __init__(self) -> None:
        self._words: dict[Work, str] = {}

    def __str__(self) -> str:
        return "; ".join(self._words.values())

    def tell(self, work: Work, fault: str = "") -> None:
        """What became of the last work of a kind; empty: it succeeded."""
        self._words.pop(work, None)
        if fault:
            self._words[work] = fault
