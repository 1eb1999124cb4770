"""Where the chunks of a prefill end."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from luceasync.prefix_cache.lease import (
    MIN_LAST_TOKENS,
    chunk_end,
    chunk_ends,
    opener_of,
    split_points,
)


@pytest.mark.parametrize(
    ("begin", "num_tokens", "end"),
    [
        (0, 1, 1),
        (0, 64, 64),
        (0, 65, 64),
        (64, 65, 65),
        (10, 200, 64),
        (63, 200, 64),
        (64, 200, 128),
    ],
)
def test_chunks_end_at_multiples(begin: int, num_tokens: int, end: int):
    assert chunk_end(begin, num_tokens, 64) == end


@given(st.integers(1, 2000), st.integers(1, 8).map(lambda n: 64 * n), st.data())
def test_cuts_do_not_depend_on_where_prefill_began(num_tokens: int, chunk: int, data):
    begin = data.draw(st.integers(0, num_tokens - 1))
    cuts = []
    while begin < num_tokens:
        begin = chunk_end(begin, num_tokens, chunk)
        cuts.append(begin)
    assert cuts[-1] == num_tokens
    assert all(cut % chunk == 0 for cut in cuts[:-1])


def test_chunks_end_at_multiples_whatever_was_taken_up():
    assert chunk_ends(0, 1000, 256) == [256, 512, 768, 1000]
    assert chunk_ends(300, 1000, 256) == [512, 768, 1000]


def test_a_turn_ends_a_chunk_and_the_next_multiple_stays():
    assert chunk_ends(0, 600, 256, splits=(100,)) == [100, 256, 512, 600]


def test_turns_that_follow_each_other_closely_are_run_in_one():
    assert split_points([100, 120, 400], 1000, 512) == (100, 400)


@pytest.mark.parametrize("opener", [996, 940])
def test_what_opens_the_answer_is_run_with_what_is_before_it(opener: int):
    assert split_points([opener], 1000, 512) == ()
    assert split_points([100, 800, opener], 1000, 512) == (100, 800)


@pytest.mark.parametrize(
    ("boundaries", "num_tokens", "opener"),
    [
        ([100, 996], 1000, 996),
        ([100], 1000, None),  # the prompt ends within a turn
        ([100, 1000], 1000, None),  # nothing opens an answer
        ([60], 66, None),  # too little before it
        ([], 1000, None),
    ],
)
def test_the_answer_is_opened_after_the_last_turn(boundaries, num_tokens, opener):
    assert opener_of(boundaries, num_tokens) == opener


def test_no_other_turn_is_a_chunk_that_ends_with_the_prompt():
    assert MIN_LAST_TOKENS > 4
    assert split_points([996, 1000], 1000, 512) == ()


@given(st.integers(0, 900), st.integers(1, 900), st.lists(st.integers(1, 900), max_size=5))
def test_from_a_chunks_end_on_the_chunks_are_those_of_a_run_from_the_start(begin, more, turns):
    num_tokens = begin + more
    splits = split_points(sorted(turns), num_tokens, 128)
    whole = chunk_ends(0, num_tokens, 128, splits)
    start = max([0, *(end for end in whole if end <= begin)])
    assert chunk_ends(start, num_tokens, 128, splits) == [end for end in whole if end > start]
    assert chunk_end(num_tokens - 1, num_tokens, 128, splits) == num_tokens
