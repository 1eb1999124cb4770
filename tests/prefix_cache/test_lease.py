"""What a generation keeps of its prompt."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from luceasync.prefix_cache.lease import Lease
from luceasync.prefix_tree.policy import PrefillCut
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


def test_a_recurrent_prompt_is_kept_where_chunks_end():
    lease = planned(lease_of(range(1000), 100, 500, 990), recurrent=True, interval_tokens=300)
    assert lease.splits == (100, 500)
    assert lease.mark_within(768, 1000) == 990
    ends = [cut.end for cut in lease.cuts]
    assert ends == [100, 256, 500, 768, 990, 1000]


@pytest.mark.parametrize("recurrent", [True, False])
def test_what_opens_the_answer_is_cut_off_even_right_after_what_is_known(recurrent: bool):
    lease = planned(lease_of(range(1000), 100, 995), begin=990, recurrent=recurrent)
    assert [cut.end for cut in lease.cuts] == [995, 1000]


@pytest.mark.parametrize(
    ("begin", "end", "mark"),
    [(900, 1000, 995), (900, 995, None), (995, 1000, None), (0, 256, None), (994, 996, 995)],
)
def test_the_state_is_taken_within_the_chunk_that_the_opening_is_in(begin, end, mark):
    lease = planned(lease_of(range(1000), 100, 995), recurrent=True)
    assert lease.mark_within(begin, end) == mark


def test_of_attention_no_state_is_taken():
    lease = planned(lease_of(range(1000), 100, 995), recurrent=False)
    assert lease.mark_within(900, 1000) is None


@pytest.mark.parametrize("recurrent", [True, False])
def test_the_first_turn_is_kept_apart_however_short_the_question_is(recurrent: bool):
    lease = planned(lease_of(range(128), 100, 108), recurrent=recurrent)
    assert [cut.end for cut in lease.cuts] == [100, 108, 128]


def test_attention_is_kept_at_the_turns_end_itself():
    lease = planned(lease_of(range(1000), 500), recurrent=False)
    assert list(lease.cuts) == [
        PrefillCut(500, is_turn_end=True),
        PrefillCut(1000, is_turn_end=False),
    ]
    assert lease.splits == ()


def test_what_is_kept_already_is_not_kept_again():
    lease = lease_of(range(1000), 500)
    lease.path_end = 600  # known, but run again
    assert [cut.end for cut in planned(lease, recurrent=False).cuts] == [1000]


def test_where_it_parts_from_another_prompt_a_chunk_ends_and_a_state_is_kept():
    lease = lease_of(range(2000), 980)
    lease.set_shared(700)
    planned(lease, recurrent=True)
    assert lease.splits == (640, 980) and lease.forks == (640,)
    assert PrefillCut(640, is_turn_end=True) in lease.cuts


def test_attention_has_no_chunk_of_its_own_but_a_node_even_of_what_it_took_up():
    lease = lease_of(range(2000), 980)
    lease.set_shared(700)
    planned(lease, begin=640, recurrent=False)
    assert [cut.end for cut in lease.cuts] == [640, 980, 2000]
    assert lease.forks == (640,) and lease.splits == ()


@pytest.mark.parametrize("recurrent", [True, False])
def test_behind_its_tools_a_node_ends_whatever_was_run_before(recurrent: bool):
    lease = lease_of(range(2000), 980, tools_end=700)
    planned(lease, recurrent=recurrent, interval_tokens=4096)
    assert lease.splits == ((640, 980) if recurrent else ())
    assert lease.forks == (640,) and PrefillCut(640, is_turn_end=True) in lease.cuts


def test_tools_that_are_known_are_not_kept_again_but_chunks_stay_the_same():
    lease = lease_of(range(2000), 980, tools_end=700)
    lease.path_end = 640
    assert planned(lease, recurrent=True).splits == (640, 980)
    assert lease.forks == () and min(cut.end for cut in lease.cuts) > 640


def test_of_a_fork_right_behind_the_tools_one_state_is_kept():
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
    """Its tokens grow with the generation; all else is for the lease to write."""
    for path in sorted(PACKAGE.rglob("*.py")):
        found = writes_to_leases(path.read_text(encoding="utf-8"))
        assert set(found) <= {"self.lease.sequence"}, path


@pytest.mark.parametrize("line", ["lease.path = []", "lease.awaited.discard(k)", "g.lease.x += 1"])
def test_who_writes_into_a_lease_is_found(line: str):
    assert len(writes_to_leases(line)) == 1
