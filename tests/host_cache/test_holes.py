"""Free parts of a range of bytes: what was given and not taken."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.host_cache.arena import Holes


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_holes_are_what_was_given_and_not_taken(data: st.DataObject):
    holes, free, taken = Holes(), set(), []
    holes.give(0, 40)
    free.update(range(40))
    for _ in range(data.draw(st.integers(1, 25))):
        if taken and data.draw(st.booleans()):
            begin, end = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            holes.give(begin, end)
            free.update(range(begin, end))
        else:
            size = data.draw(st.integers(1, 12))
            begin = holes.take(size)
            fits = [a for a in range(40) if free.issuperset(range(a, a + size))]
            assert begin == (min(fits) if fits else None)
            if begin is not None:
                taken.append((begin, begin + size))
                free.difference_update(range(begin, begin + size))
        found = list(holes)
        assert {i for begin, end in found for i in range(begin, end)} == free
        assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
        assert holes.num_bytes == len(free)


@pytest.mark.parametrize("twice", [(2, 6), (5, 12), (0, 3)])
def test_what_is_free_already_is_not_given(twice: tuple[int, int]):
    holes = Holes()
    holes.give(2, 8)
    with pytest.raises(AssertionError, match="free already"):
        holes.give(*twice)
