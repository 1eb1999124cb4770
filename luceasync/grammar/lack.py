"""How much a drafter lacks of what a grammar says must come: whether to look into its proposals.

Owns one number, which rises with each round that has shown a lack and falls with every round.
"""

from __future__ import annotations

FIRST, SHOWN, LITTLE, MOST = 4, 3, 3, 7


class Lack:
    """Of one answer's drafter. Much after two rounds of three that have shown it, and before the
    first round, which tells whether the drafter knows the form.
    """

    def __init__(self) -> None:
        self._level = FIRST

    @property
    def is_much(self) -> bool:
        return self._level > LITTLE

    def begin(self) -> None:
        """Another form begins."""
        self._level = max(self._level, FIRST)

    def show(self) -> None:
        """This round has shown it."""
        self._level = min(MOST, self._level + SHOWN)

    def end_round(self) -> None:
        """A round more."""
        self._level = max(0, self._level - 1)
