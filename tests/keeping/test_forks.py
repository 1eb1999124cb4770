"""A place where prompts part is worth a state where one saves enough tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from luceasync.keeping.forks import LEAST_TOKENS, fork_behind_tools, fork_of, least_tokens
from luceasync.keeping.memory_nodes import NodeSize


def test_the_place_is_the_last_multiple_of_64_that_both_share():
    assert fork_of(5000, 5100, 4096, [], 256) == 4992


@pytest.mark.parametrize(
    ("num_shared", "known_end", "turns"),
    [
        (5100, 4096, []),  # all of the prompt was seen: nothing parts
        (5000, 4800, []),  # a state is near: it is known up to there
        (5000, 0, [4900, 5060]),  # a turn ends near
        (5000, 0, [4995]),  # or between the place and where they part
        (200, 0, []),  # little is shared at all
        (0, 4096, []),  # what it goes on from has been forgotten since
    ],
)
def test_no_state_where_it_saves_little(num_shared, known_end, turns):
    assert fork_of(num_shared, 5100, known_end, turns, 256) is None


def test_a_turns_end_behind_the_place_does_not_serve_who_parts_there():
    assert fork_of(5000, 5100, 4096, [5010], 256) == 4992


def test_a_large_state_must_save_more():
    assert least_tokens(NodeSize(1024, 0)) == LEAST_TOKENS
    assert least_tokens(NodeSize(1024, 1024 * 8 * 400)) == 400


@pytest.mark.parametrize(
    ("tools_end", "fork"), [(None, None), (0, None), (299, None), (330, 320), (1000, None)]
)
def test_behind_tools_that_are_long_enough_there_is_a_fork(tools_end, fork):
    assert fork_behind_tools(tools_end, 900, 300) == fork


@given(st.integers(0, 900), st.integers(1, 900), st.integers(0, 900), st.lists(st.integers(1, 900)))
def test_it_lies_within_what_is_shared_and_run(num_shared, num_tokens, known_end, turns):
    fork = fork_of(num_shared, num_tokens, known_end, turns, 64)
    if fork is not None:
        assert known_end + 64 <= fork <= num_shared < num_tokens
        assert num_shared - fork < 64 and not any(fork - 64 < turn <= fork for turn in turns)
