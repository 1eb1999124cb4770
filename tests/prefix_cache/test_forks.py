"""A place where prompts part is worth a state where one saves enough tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from luceasync.prefix_cache.lease import (
    MIN_STATE_TOKENS,
    fork_behind_tools,
    fork_of,
    min_state_tokens,
)
from luceasync.prefix_cache.memory import NodeSize
from tests.prefix_cache.kept import Bench
from tests.prefix_cache.test_prefixes import PROMPT, restarted, served, state_ends


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
    assert min_state_tokens(NodeSize(1024, 0)) == MIN_STATE_TOKENS
    assert min_state_tokens(NodeSize(1024, 1024 * 8 * 400)) == 400


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


# --- what comes of it ----------------------------------------------------------------------------


def parting(last: int, num_shared: int = 900) -> list[int]:
    """A first turn that parts from others of its kind after `num_shared` tokens."""
    return [*(PROMPT * 3)[:num_shared], *[last] * 100, *[7] * 40]


def test_where_two_prompts_part_within_a_turn_the_third_goes_on():
    bench = Bench()
    assert [bench.serve(parting(last), 1000) for last in (0, 5, 6)] == [0, 0, 896]


def test_what_prompts_share_that_part_within_a_turn_is_written_twice_not_by_each_of_them():
    bench, new_tokens = Bench(recurrent=False), []
    for last in (0, 5, 6, 8):
        before = {node.key for node in bench.index}
        bench.serve(parting(last), 1000)
        new = [len(node.tokens) for node in bench.index if node.key not in before]
        new_tokens.append(sum(new))
    bench.disk.deliver_all(bench.prefixes)
    assert new_tokens == [1040, 1040, 144, 144]


def test_it_does_so_after_a_restart_too():
    bench = Bench()
    for last in (0, 5):
        bench.serve(parting(last), 1000)
    bench.disk.deliver_all(bench.prefixes)
    assert restarted(bench).serve(parting(6), 1000) == 896


def test_a_restart_between_them_hides_no_fork():
    bench = served(Bench())
    bench.serve(parting(0), 1000)
    bench.disk.deliver_all(bench.prefixes)
    after = restarted(bench)
    assert [after.serve(parting(last), 1000) for last in (5, 6)] == [300, 896]


def test_of_prompts_that_part_and_come_at_once_the_third_waits_for_the_second():
    bench = Bench()
    first, second, third = (bench.lease(parting(last), 1000) for last in (0, 5, 6))
    assert bench.prefixes.prepare(first, [])
    bench.prefixes.restore(first, 0)
    assert bench.prefixes.prepare(second, [first])  # of what the first keeps nothing serves
    bench.prefixes.restore(second, 1)
    assert not bench.prefixes.prepare(third, [first, second])
    bench.prefill(second, 1)
    assert bench.start(third, 2) == 896


def test_prompts_that_share_little_leave_no_state_for_it():
    bench = Bench()
    for last in (0, 5):
        bench.serve(parting(last, num_shared=63), 163)
    assert bench.ends("memory") == {163: True, 203: True}


@pytest.mark.parametrize("recurrent", [True, False])
def test_the_second_prompt_with_the_same_tools_goes_on_behind_them(recurrent: bool):
    bench = Bench(recurrent=recurrent)
    first, second = ([*PROMPT[:200], *[last] * 100] for last in (0, 5))
    bench.serve(first, 280, tools_end=200)
    bench.disk.deliver_all(bench.prefixes)
    assert 192 in (state_ends(bench) if recurrent else bench.ends("disk"))
    assert restarted(bench).serve(second, 280, tools_end=200) == 192
    assert bench.serve(second, 280, tools_end=200) == 192


def test_the_state_of_a_fork_stays_while_the_conversation_behind_it_grows():
    bench = Bench(interval_tokens=320, disk_bytes=None)
    bench.serve(parting(0), 1000)
    bench.serve([*parting(5), *PROMPT * 4], 1000)
    assert bench.ends("memory")[896]
