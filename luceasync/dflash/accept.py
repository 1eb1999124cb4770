"""Which rows of a verified proposal stand: the walk from the anchor down its tree.

Pure and on the host. Knows neither how a token is chosen nor what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Follow = Callable[[int], int | None]


def matching_child(
    tokens: Sequence[int], parents: Sequence[int] | None, path: Sequence[int], token: int
) -> int | None:
    """The row below the last one of `path` that proposes `token`; None where there is none.

    `parents` None: every row follows the one before it.
    """
    row = path[-1]
    if parents is None:
        return row + 1 if row + 1 < len(tokens) and tokens[row + 1] == token else None
    below = range(row + 1, len(tokens))
    return next((r for r in below if parents[r] == row and tokens[r] == token), None)


Decide = Callable[[Sequence[int], Sequence[int] | None, Sequence[int], int], int | None]


def walk(
    tokens: Sequence[int],
    parents: Sequence[int] | None,
    follow: Follow,
    decide: Decide = matching_child,
) -> list[int]:
    """The accepted rows, row 0 first: as many as tokens were emitted, since the last of these has
    not been run, whether or not a row proposed it.

    `follow(row)` chooses and emits the token after a row, once for every row of the path; None ends
    the text there. `decide` says which row, if any, stands for that token; only a measurement of
    time has a reason to replace it.
    """
    path = [0]
    while True:
        token = follow(path[-1])
        row = None if token is None else decide(tokens, parents, path, token)
        if row is None:
            return path
        path.append(row)


def lines(parents: Sequence[int] | None, num_rows: int) -> list[list[int]]:
    """For every row the rows from the anchor's child down to itself; none for row 0."""
    above = range(-1, num_rows - 1) if parents is None else parents
    found: list[list[int]] = [[]]
    for row in range(1, num_rows):
        found.append([*found[above[row]], row])
    return found
