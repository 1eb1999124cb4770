"""Where a prompt is cut and its chunks end: at turns, forks and marks."""

from __future__ import annotations

import ast
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from luceasync.prefix_cache.lease import (
    MIN_LAST_TOKENS,
    MIN_STATE_TOKENS,
    Lease,
    chunk_end,
    chunk_ends,
    fork_behind_tools,
    fork_of,
    marked_places,
    min_state_tokens,
    opener_of,
    split_points,
)
from luceasync.prefix_cache.memory import NodeSize
from luceasync.prefix_tree.policy import PrefillCut
from tests.prefix_cache.test_cache import PROMPT, restarted, served, state_ends
from tests.prefix_cache.token_target import Bench
from tests.prompts import lease_of

PACKAGE = Path(__file__).parents[2] / "luceasync"
CHANGES = {"append", "extend", "add", "discard", "remove", "update", "clear", "pop", "popleft"}


def planned(lease: Lease, begin: int = 0, *, recurrent: bool, interval_tokens=2048) -> Lease:
    lease.plan_prefill(
        begin,
        recurrent=recurrent,
        chunk_tokens=256,
        interval_tokens=interval_tokens,
        min_fork_tokens=256,
    )
    return lease


def test_a_recurrent_prompt_is_saved_where_chunks_end():
    lease = planned(lease_of(range(1000), 100, 500, 990), recurrent=True, interval_tokens=300)
    assert lease.splits == (100, 500)
    assert lease.mark_within(768, 1000) == 990
    ends = [cut.end for cut in lease.cuts]
    assert ends == [100, 256, 500, 768, 990, 1000]


@pytest.mark.parametrize("recurrent", [True, False])
def test_the_opening_is_cut_off_even_right_after_known_tokens(recurrent: bool):
    lease = planned(lease_of(range(1000), 100, 995), begin=990, recurrent=recurrent)
    assert [cut.end for cut in lease.cuts] == [995, 1000]


@pytest.mark.parametrize(
    ("begin", "end", "mark"),
    [(900, 1000, 995), (900, 995, None), (995, 1000, None), (0, 256, None), (994, 996, 995)],
)
def test_the_state_is_taken_within_the_chunk_that_the_opening_is_in(begin, end, mark):
    lease = planned(lease_of(range(1000), 100, 995), recurrent=True)
    assert lease.mark_within(begin, end) == mark


def test_attention_takes_no_state():
    lease = planned(lease_of(range(1000), 100, 995), recurrent=False)
    assert lease.mark_within(900, 1000) is None


@pytest.mark.parametrize("recurrent", [True, False])
def test_the_first_turn_is_a_node_however_short_the_question_is(recurrent: bool):
    lease = planned(lease_of(range(128), 100, 108), recurrent=recurrent)
    assert [cut.end for cut in lease.cuts] == [100, 108, 128]


def test_attention_is_cut_at_the_turns_end_itself():
    lease = planned(lease_of(range(1000), 500), recurrent=False)
    assert list(lease.cuts) == [
        PrefillCut(500, is_turn_end=True),
        PrefillCut(1000, is_turn_end=False),
    ]
    assert lease.splits == ()


def test_saved_tokens_are_not_saved_again():
    lease = lease_of(range(1000), 500)
    lease.path_end = 600  # known, but run again
    assert [cut.end for cut in planned(lease, recurrent=False).cuts] == [1000]


def test_where_prompts_part_a_chunk_ends_and_a_state_is_saved():
    lease = lease_of(range(2000), 980)
    lease.set_shared(700)
    planned(lease, recurrent=True)
    assert lease.splits == (640, 980) and lease.forks == (640,)
    assert PrefillCut(640, is_turn_end=True) in lease.cuts


def test_where_prompts_part_attention_ends_a_node_but_no_chunk():
    lease = lease_of(range(2000), 980)
    lease.set_shared(700)
    planned(lease, begin=640, recurrent=False)
    assert [cut.end for cut in lease.cuts] == [640, 980, 2000]
    assert lease.forks == (640,) and lease.splits == ()


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_node_ends_behind_the_tools_whatever_was_run_before(recurrent: bool):
    lease = lease_of(range(2000), 980, tools_end=700)
    planned(lease, recurrent=recurrent, interval_tokens=4096)
    assert lease.splits == ((640, 980) if recurrent else ())
    assert lease.forks == (640,) and PrefillCut(640, is_turn_end=True) in lease.cuts


def test_known_tools_are_not_saved_again_but_chunks_stay_the_same():
    lease = lease_of(range(2000), 980, tools_end=700)
    lease.path_end = 640
    assert planned(lease, recurrent=True).splits == (640, 980)
    assert lease.forks == () and min(cut.end for cut in lease.cuts) > 640


def test_a_fork_right_behind_the_tools_has_one_state():
    lease = lease_of(range(2000), 980, tools_end=700)
    lease.set_shared(730)
    assert planned(lease, recurrent=True).forks == (640,)


def writes_to_leases(source: str) -> list[str]:
    """Where a field of something named lease is assigned, or changed in place."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func.value] if node.func.attr in CHANGES else []
        else:
            continue
        for target in targets:
            owner = target.value if isinstance(target, ast.Attribute) else None
            name = getattr(owner, "id", getattr(owner, "attr", ""))
            if name == "lease":
                found.append(ast.unparse(target))
    return found


@pytest.mark.slow
def test_a_lease_has_one_owner():
    """Its tokens grow with the generation; only the lease writes its other fields."""
    for path in sorted(PACKAGE.rglob("*.py")):
        found = writes_to_leases(path.read_text(encoding="utf-8"))
        assert set(found) <= {"self.lease.sequence"}, path


@pytest.mark.parametrize("line", ["lease.path = []", "lease.awaited.discard(k)", "g.lease.x += 1"])
def test_an_assignment_to_a_lease_is_found(line: str):
    assert len(writes_to_leases(line)) == 1


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


def test_chunks_end_at_multiples_whatever_was_restored():
    assert chunk_ends(0, 1000, 256) == [256, 512, 768, 1000]
    assert chunk_ends(300, 1000, 256) == [512, 768, 1000]


def test_a_turn_ends_a_chunk_and_the_next_multiple_stays():
    assert chunk_ends(0, 600, 256, splits=(100,)) == [100, 256, 512, 600]


def test_short_turns_share_a_chunk():
    assert split_points([100, 120, 400], 1000, 512) == (100, 400)


@pytest.mark.parametrize("opener", [996, 940])
def test_the_opening_is_run_with_what_is_before_it(opener: int):
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


def test_a_fork_is_the_last_multiple_of_64_that_both_share():
    assert fork_of(5000, 5100, 4096, [], 256) == 4992


@pytest.mark.parametrize(
    ("num_shared", "known_end", "turns"),
    [
        (5100, 4096, []),  # all of the prompt was seen: nothing parts
        (5000, 4800, []),  # a state is near: it is known up to there
        (5000, 0, [4900, 5060]),  # a turn ends near
        (5000, 0, [4995]),  # or between the place and where they part
        (200, 0, []),  # little is shared at all
        (0, 4096, []),  # its ancestors were dropped since
    ],
)
def test_no_fork_where_a_state_saves_little(num_shared, known_end, turns):
    assert fork_of(num_shared, 5100, known_end, turns, 256) is None


def test_a_turns_end_behind_the_fork_does_not_replace_it():
    assert fork_of(5000, 5100, 4096, [5010], 256) == 4992


def test_a_large_state_must_save_more():
    assert min_state_tokens(NodeSize(1024, 0)) == MIN_STATE_TOKENS
    assert min_state_tokens(NodeSize(1024, 1024 * 8 * 400)) == 400


@pytest.mark.parametrize(
    ("tools_end", "fork"), [(None, None), (0, None), (299, None), (330, 320), (1000, None)]
)
def test_behind_tools_that_are_long_enough_there_is_a_fork(tools_end, fork):
    assert fork_behind_tools(tools_end, 900, 300) == fork


@pytest.mark.slow
@given(st.integers(0, 900), st.integers(1, 900), st.integers(0, 900), st.lists(st.integers(1, 900)))
def test_a_fork_lies_within_what_is_shared_and_run(num_shared, num_tokens, known_end, turns):
    fork = fork_of(num_shared, num_tokens, known_end, turns, 64)
    if fork is not None:
        assert known_end + 64 <= fork <= num_shared < num_tokens
        assert num_shared - fork < 64 and not any(fork - 64 < turn <= fork for turn in turns)


# --- forks in use --------------------------------------------------------------------------------


def parting(last: int, num_shared: int = 900) -> list[int]:
    """A first turn that parts from others of its kind after `num_shared` tokens."""
    return [*(PROMPT * 3)[:num_shared], *[last] * 100, *[7] * 40]


def test_a_third_prompt_continues_where_two_part_within_a_turn():
    bench = Bench()
    assert [bench.serve(parting(last), 1000) for last in (0, 5, 6)] == [0, 0, 896]


def test_what_prompts_share_within_a_turn_is_written_at_most_twice():
    bench, new_tokens = Bench(recurrent=False), []
    for last in (0, 5, 6, 8):
        before = {node.key for node in bench.index}
        bench.serve(parting(last), 1000)
        new = [len(node.tokens) for node in bench.index if node.key not in before]
        new_tokens.append(sum(new))
    bench.disk.deliver_all(bench.prefixes)
    assert new_tokens == [1040, 1040, 144, 144]


def test_a_third_prompt_continues_there_after_a_restart_too():
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


def test_of_prompts_that_come_at_once_the_third_waits_for_the_second():
    bench = Bench()
    first, second, third = (bench.lease(parting(last), 1000) for last in (0, 5, 6))
    assert bench.prefixes.prepare(first, [])
    bench.prefixes.restore(first, 0)
    assert bench.prefixes.prepare(second, [first])  # nothing that the first will save is of use
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
def test_the_second_prompt_with_the_same_tools_continues_behind_them(recurrent: bool):
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
        ((1600, 9999), ()),  # the prompt's end is saved anyway
    ],
)
def test_a_place_is_shortly_before_its_mark(marks, expected):
    assert places(*marks) == expected


def test_a_mark_near_a_saved_state_adds_none():
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
