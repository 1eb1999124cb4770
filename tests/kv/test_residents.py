"""Row indices, places and absent tokens, compared with a list of a lane's rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.kv.residents import Residents

NUM_CHUNKS, NUM_PAGES = 9, 6


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_ranks_and_places_are_those_of_a_list_of_the_rows_that_are_here(data: st.DataObject):
    residents, here = Residents(), {}
    for _ in range(data.draw(st.integers(0, 12))):
        free = sorted(set(range(NUM_PAGES)) - set(here.values()))
        if here and (not free or data.draw(st.booleans())):
            chunk = data.draw(st.sampled_from(sorted(here)))
            del here[chunk]
            residents.drop(chunk)
        else:
            chunk = data.draw(st.integers(0, NUM_CHUNKS - 1))
            here[chunk] = data.draw(st.sampled_from(free))
            residents.put(chunk, here[chunk])
    rows = [
        (chunk * CHUNK_TOKENS + i, page * CHUNK_TOKENS + i)
        for chunk, page in sorted(here.items())
        for i in range(CHUNK_TOKENS)
    ]
    assert list(residents.pages) == [page for _, page in sorted(here.items())]
    assert [residents.row_index(token) for token, _ in rows] == [*range(len(rows))]
    end = rows[-1][0] + 1 if rows else 0
    assert residents.num_absent_tokens == end - len(rows)
    assert residents.row_index(end) == len(rows)
    begin, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    runs = [run for run in residents.runs(begin, stop) if run]
    assert [place for run in runs for place in run] == [place for _, place in rows[begin:stop]]
    assert all(a.stop != b.start for a, b in itertools.pairwise(runs))
    in_order = [place for _, place in rows[:stop]] == [*range(stop)]
    assert residents.is_in_order(stop) == in_order


def test_nothing_is_here_after_clear():
    residents = Residents()
    residents.put(3, 0)
    residents.clear()
    assert (list(residents.pages), residents.num_absent_tokens, residents.row_index(0)) == (
        [],
        0,
        0,
    )
