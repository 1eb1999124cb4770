"""Where states are kept for a client's marks: within chunks that end where they would anyway."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.prefix_cache.lease import marked_places
from tests.prompts import lease_of

CHUNK_ENDS = (512, 1024, 1536, 1600)


def places(*marks: int, begin: int = 0, opener: int | None = None, turns=(), min_tokens=64):
    return marked_places(
        marks, begin, CHUNK_ENDS, opener=opener, turns=turns, min_tokens=min_tokens
    )


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ((300,), (256,)),
        ((512,), (512,)),  # between two chunks
        ((530,), (512,)),
        ((300, 400), (384,)),  # one in a chunk
        ((300, 700), (256, 640)),
        ((30,), ()),  # saves nothing
        ((1600, 9999), ()),  # the prompt's end is kept anyway
    ],
)
def test_a_place_is_shortly_before_its_mark(marks, expected):
    assert places(*marks) == expected


def test_what_is_there_already_is_not_kept_again():
    assert places(300, begin=300) == () and places(700, begin=640) == ()
    assert places(300, turns=[250]) == ()
    assert places(300, turns=[350]) == (256,)


def test_a_chunk_has_one_place_and_the_opener_comes_first():
    assert places(300, opener=500) == ()
    assert places(530, opener=700) == (512,)


@given(
    marks=st.lists(st.integers(-5, 1700), max_size=6),
    begin=st.integers(0, 1500),
    opener=st.none() | st.integers(64, 1600),
    turns=st.lists(st.integers(1, 1599), max_size=3),
)
def test_places_lie_in_chunks_of_their_own_and_before_marks(marks, begin, opener, turns):
    ends = [end for end in CHUNK_ENDS if end > begin]
    found = marked_places(marks, begin, ends, opener=opener, turns=turns, min_tokens=64)
    within = [place for place in found if place not in ends]
    for place in found:
        assert begin + 64 <= place < 1600 and any(place <= mark < place + 64 for mark in marks)
    chunks = [sum(end <= place for end in ends) for place in within]
    assert len(set(chunks)) == len(chunks)
    if opener is not None:
        assert sum(end <= opener for end in ends) not in chunks


@pytest.mark.parametrize("recurrent", [True, False])
def test_marks_move_no_end_of_a_chunk(recurrent: bool):
    leases = [lease_of(range(2000), 980, 1990, marks=marks) for marks in ((), (300, 700, 1500))]
    for lease in leases:
        lease.plan_prefill(
            0, recurrent=recurrent, chunk_tokens=512, interval_tokens=4096, min_fork_tokens=64
        )
    plain, marked = leases
    assert marked.splits == plain.splits
    more = {256, 640, 1472} if recurrent else set()
    assert {cut.end for cut in marked.cuts} - {cut.end for cut in plain.cuts} == more
