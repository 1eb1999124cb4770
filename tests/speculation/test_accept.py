"""The walk down a verified tree: as many rows as tokens were emitted, and no further."""

from __future__ import annotations

import pytest

from luceasync.speculation.speculator import lines, matching_child, walk

#            0
#          1   2
#         3 4   5
TOKENS = [9, 10, 20, 11, 12, 21]
PARENTS = [-1, 0, 0, 1, 1, 2]


def follow_from(emitted: list[int], tokens: dict[int, int | None]):
    """Emits what `tokens` has for each row."""

    def follow(row: int) -> int | None:
        emitted.append(row)
        return tokens[row]

    return follow


@pytest.mark.parametrize(
    ("after", "path"),
    [
        ({0: 7}, [0]),  # nobody proposed it: the bonus
        ({0: 20, 2: 7}, [0, 2]),
        ({0: 10, 1: 12, 4: 10}, [0, 1, 4]),  # token 10 stands elsewhere in the tree
        ({0: 10, 1: 21}, [0, 1]),
        ({0: 20, 2: 21, 5: 10}, [0, 2, 5]),  # below a leaf is nothing
        ({0: 10, 1: None}, [0, 1]),  # the text ended with what row 1 gave
        ({0: None}, [0]),
    ],
)
def test_the_path_follows_the_chosen_tokens(after, path):
    emitted: list[int] = []
    assert walk(TOKENS, PARENTS, follow_from(emitted, after)) == path
    assert emitted == path  # each row was asked once


@pytest.mark.parametrize(
    ("after", "path"),
    [
        ({0: 11}, [0]),
        ({0: 10, 1: 20, 2: 5}, [0, 1, 2]),
        ({0: 10, 1: 20, 2: 30, 3: 10}, [0, 1, 2, 3]),
        ({0: 20}, [0]),  # the token of the row after next
        ({0: 10, 1: None}, [0, 1]),
    ],
)
def test_without_parents_each_row_follows_the_one_before(after, path):
    assert walk([9, 10, 20, 30], None, follow_from([], after)) == path


def test_of_equal_rows_the_first_stands():
    assert matching_child([9, 5, 5], [-1, 0, 0], [0], 5) == 1


def test_the_decision_can_be_replaced():
    def always_two(tokens, parents, path, token):
        return path[-1] + 1 if len(path) <= 2 else None

    assert walk([9, 1, 1, 1], None, lambda row: 77, always_two) == [0, 1, 2]


def test_lines_lead_from_below_the_anchor_to_each_row():
    assert lines(PARENTS, 6) == [[], [1], [2], [1, 3], [1, 4], [2, 5]]
    assert lines(None, 3) == [[], [1], [1, 2]]
