"""What is restored, what is saved, and which prompts wait for what."""

from __future__ import annotations

import pytest
import torch

from luceasync.disk_cache.outcomes import Miss
from luceasync.host_cache.nodes import NodeSizes
from luceasync.prefix_tree.node import tenant_key
from tests.prefix_cache.token_target import FAULT, GONE, TOKEN_BYTES, Bench

PROMPT = [1, 2, 3, 4] * 75


def served(bench: Bench, *boundaries: int, num_generated: int = 20) -> Bench:
    """The bench after a request and all that was to be written of it."""
    bench.serve(PROMPT, *boundaries, num_generated=num_generated)
    bench.disk.deliver_all(bench.prefixes)
    return bench


def restarted(bench: Bench, **limits) -> Bench:
    return Bench(recurrent=bench.target.recurrent, disk=bench.disk, **limits)


def state_ends(bench: Bench) -> list[int]:
    return sorted(end for end, has_state in bench.ends("disk").items() if has_state)


# --- restored ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_prompt_that_was_run_is_not_run_again(recurrent: bool):
    bench = Bench(recurrent=recurrent)
    assert bench.serve(PROMPT) == 0
    assert bench.serve(PROMPT) == len(PROMPT)
    assert bench.target.num_run == len(PROMPT)


@pytest.mark.parametrize("recurrent", [True, False])
def test_the_next_turn_runs_only_its_own_tokens(recurrent: bool):
    bench = Bench(recurrent=recurrent)
    lease = bench.lease(PROMPT)
    bench.start(lease)
    bench.prefill(lease)
    bench.end(lease, num_generated=20)
    assert bench.serve([*lease.sequence, 7, 7]) == len(lease.sequence)


def test_attention_restores_part_of_a_node():
    bench = Bench(recurrent=False)
    bench.serve(PROMPT)
    assert bench.serve([*PROMPT[:200], 7]) == 192


def test_a_recurrent_model_restores_the_first_turn_that_two_chats_share():
    bench = Bench()
    bench.serve([*PROMPT, *[5] * 100], 300)
    assert bench.serve([*PROMPT, *[6] * 100], 300) == 300


def test_tenants_never_restore_each_others_nodes():
    bench, other = served(Bench(), num_generated=0), tenant_key("other")
    assert bench.serve(PROMPT, tenant=other) == 0
    bench.disk.deliver_all(bench.prefixes)
    after = restarted(bench)
    assert after.serve(PROMPT, tenant=tenant_key("third")) == 0
    assert after.serve(PROMPT, tenant=other) == after.serve(PROMPT) == len(PROMPT)


# --- written to disk --------------------------------------------------------------------------


def test_each_turn_writes_two_states_and_the_first_turn_one_more():
    bench, prompt = Bench(interval_tokens=64), [*PROMPT]
    ends = []
    for turn in range(4):
        lease = bench.lease(prompt, 100, len(prompt) - 20)
        bench.prefill(lease, begin=bench.start(lease))
        bench.end(lease, num_generated=20)
        ends += [len(prompt) - 20, len(lease.sequence)]
        prompt = [*lease.sequence, *[turn] * 90]
    bench.disk.deliver_all(bench.prefixes)
    assert state_ends(bench) == [100, *ends]
    assert len(bench.ends("disk")) > len(ends) + 1  # the rows of all of them are there


def test_the_prompts_state_is_written_only_if_nothing_follows():
    assert len(PROMPT) not in state_ends(served(Bench(), num_generated=20))
    assert len(PROMPT) in state_ends(served(Bench(), num_generated=0))


def test_it_is_written_if_the_answer_ends_with_a_stop_string():
    bench = Bench()
    lease = bench.lease(PROMPT)
    bench.prefill(lease, begin=bench.start(lease))
    bench.end(lease, num_generated=20, is_cut=True)
    bench.disk.deliver_all(bench.prefixes)
    assert max(state_ends(bench)) == len(PROMPT)
    assert restarted(bench).serve([*PROMPT, *lease.sequence[len(PROMPT) : -3], 7]) == len(PROMPT)


def test_it_is_written_if_the_client_asked_to_cache_it():
    bench = Bench()
    bench.serve(PROMPT, num_generated=20, keep=True)
    bench.disk.deliver_all(bench.prefixes)
    after = restarted(bench)
    assert after.serve(PROMPT) == len(PROMPT)
    assert after.target.num_run == 0


def test_a_state_that_was_restored_is_written():
    bench = served(Bench())
    bench.serve([*PROMPT, 7])
    bench.disk.deliver_all(bench.prefixes)
    assert len(PROMPT) in state_ends(bench)


def test_a_restored_state_is_not_written_a_few_tokens_after_one_on_the_disk():
    bench = Bench()
    lease = bench.lease(PROMPT, 100, 280)  # 20 tokens open the answer
    bench.prefill(lease, begin=bench.start(lease))
    bench.end(lease, num_generated=20)
    again = bench.lease([*PROMPT, 7], 100, 280)
    assert bench.start(again) == len(PROMPT)
    bench.disk.deliver_all(bench.prefixes)
    assert state_ends(bench) == [100, 280, 320]


def test_untrusted_nodes_are_never_restored():
    """Its logits are NaN; what was there before stays."""
    bench = served(Bench(), 100, num_generated=0)
    lease = bench.lease([*PROMPT, *[7] * 200], 100)
    bench.prefill(lease, begin=bench.start(lease))
    bench.prefixes.hand_over()
    bench.prefixes.drop(lease)
    bench.prefixes.release(lease)
    bench.disk.deliver_all(bench.prefixes)
    assert max(bench.ends("memory")) == max(bench.ends("disk")) == len(PROMPT)
    assert len(bench.disk.files) == len(bench.ends("disk"))
    assert bench.serve([*PROMPT, *[7] * 200], 100) == len(PROMPT)


def test_the_file_of_an_untrusted_node_does_not_stand_for_the_next_one():
    bench = Bench(recurrent=False)
    lease = bench.lease(PROMPT)
    bench.start(lease)
    bench.target.lanes[0] = [6] * len(PROMPT)  # what it computes is wrong
    bench.prefixes.save_prompt(lease, 0, len(PROMPT), torch.zeros(8))
    bench.prefixes.hand_over()
    bench.prefixes.drop(lease)
    bench.prefixes.release(lease)
    bench.disk.deliver(bench.prefixes, index=1)  # there is no file yet that could be removed
    bench.serve(PROMPT)
    bench.disk.deliver_all(bench.prefixes)
    assert restarted(bench).serve([*PROMPT, 7]) in (0, len(PROMPT))


def test_it_works_without_a_disk():
    bench = Bench(disk_bytes=None)
    bench.serve(PROMPT, num_generated=9)
    assert bench.serve(PROMPT) == len(PROMPT)
    assert not bench.disk.jobs


# --- nothing that was run is lost -----------------------------------------------------------------


@pytest.mark.parametrize("num_run", [128, 256, 300])
def test_a_prefill_that_ends_at_a_cut_is_found_after_a_restart(num_run: int):
    """The node of the cut is already on its way to the disk, without its state."""
    bench, prompt = Bench(interval_tokens=128), [*PROMPT, *[5] * 300]
    bench.target.sizes = NodeSizes(TOKEN_BYTES, 1 << 16)  # too large to be written on the way
    lease = bench.lease(prompt)
    bench.start(lease)
    bench.prefill(lease, until=num_run)
    num_run = len(bench.target.lanes[0])
    bench.disk.deliver_all(bench.prefixes)
    bench.end(lease)
    bench.disk.deliver_all(bench.prefixes)
    assert restarted(bench).serve(prompt) == num_run


def test_a_prompt_that_was_run_again_for_its_state_has_it_on_disk_then():
    bench = served(Bench())
    assert len(PROMPT) not in state_ends(bench)
    for found in (0, len(PROMPT)):
        bench = restarted(bench)
        assert bench.serve([*PROMPT, 7][: len(PROMPT) + bool(found)], num_generated=9) == found
        bench.disk.deliver_all(bench.prefixes)


def test_a_turn_that_was_run_again_for_its_state_has_it_on_disk_then():
    bench = served(Bench(), 100, 200)  # 300 tokens, the last turn is no opening
    assert 200 not in state_ends(bench)
    for found in (100, 200):
        bench = restarted(bench)
        assert bench.serve([*PROMPT[:200], *[7 + found] * 90], 100, 200) == found
        bench.disk.deliver_all(bench.prefixes)


def test_a_long_prefill_writes_states_as_it_goes_a_tenth_of_its_rows_at_most():
    bench, prompt = Bench(interval_tokens=128), [i % 5 for i in range(5000)]
    bench.target.sizes = NodeSizes(TOKEN_BYTES, 400)
    lease = bench.lease(prompt)
    bench.start(lease)
    bench.prefill(lease, until=4480)
    bench.disk.deliver_all(bench.prefixes)  # and then the process is killed
    written = state_ends(bench)
    assert 400 * len(written) <= 0.1 * TOKEN_BYTES * max(written)
    assert restarted(bench).serve(prompt) == max(written) >= 4480 - 1024 - 128


# --- the opening of the answer ------------------------------------------------------------------

OPENER = len(PROMPT) - 6


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_changed_answer_continues_before_its_opening(recurrent: bool):
    bench = served(Bench(recurrent=recurrent), 100, OPENER)
    after = restarted(bench)
    for other in (bench, after):
        assert other.serve([*PROMPT[:OPENER], 7, 7, 7], 100, OPENER) == OPENER


@pytest.mark.parametrize("recurrent", [True, False])
def test_an_unchanged_answer_continues_behind_it(recurrent: bool):
    bench = Bench(recurrent=recurrent)
    lease = bench.lease(PROMPT, 100, OPENER)
    bench.prefill(lease, begin=bench.start(lease))
    bench.end(lease, num_generated=20)
    bench.disk.deliver_all(bench.prefixes)
    assert state_ends(bench) == ([100, OPENER, len(PROMPT) + 20] if recurrent else [])
    assert restarted(bench).serve([*lease.sequence, 7], 100) == len(lease.sequence)


def test_an_answer_that_cannot_return_is_not_written():
    bench = Bench()
    lease = bench.lease(PROMPT, 100, OPENER, answer_returns=lambda generated: False)
    bench.prefill(lease, begin=bench.start(lease))
    bench.end(lease, num_generated=20)
    bench.disk.deliver_all(bench.prefixes)
    assert state_ends(bench) == [100, OPENER]
    assert max(bench.ends("disk")) == OPENER
    assert bench.serve([*lease.sequence, 7], 100) == len(lease.sequence)  # memory has it


@pytest.mark.parametrize("is_kept", [True, False])
def test_whether_an_answer_can_return_depends_on_what_was_generated(is_kept: bool):
    bench = Bench()
    asked: list[list[int]] = []

    def returns(generated) -> bool:
        asked.append(list(generated))
        return is_kept

    lease = bench.lease(PROMPT, 100, OPENER, answer_returns=returns)
    bench.prefill(lease, begin=bench.start(lease))
    bench.end(lease, num_generated=20)
    bench.disk.deliver_all(bench.prefixes)
    assert asked == [list(lease.sequence[len(PROMPT) :])]
    assert (len(PROMPT) + 20 in state_ends(bench)) == is_kept


def test_without_an_opening_the_prompts_end_serves():
    bench = Bench()
    lease = bench.lease(PROMPT, answer_returns=lambda generated: False)
    bench.prefill(lease, begin=bench.start(lease))
    bench.end(lease, num_generated=20)
    bench.disk.deliver_all(bench.prefixes)
    assert max(state_ends(bench)) == len(PROMPT)


@pytest.mark.parametrize("recurrent", [True, False])
def test_the_opening_has_no_file_of_its_own(recurrent: bool):
    bench = served(Bench(recurrent=recurrent), OPENER)
    bench.serve(PROMPT, OPENER)  # from memory, to the last token
    bench.disk.deliver_all(bench.prefixes)
    assert sorted(bench.ends("disk")) == [OPENER, len(PROMPT) + 20]
    assert bench.target.num_run == len(PROMPT)


# --- from the disk ----------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [True, False])
def test_files_are_restored_after_a_restart(recurrent: bool):
    bench = served(Bench(recurrent=recurrent), num_generated=0)
    after = restarted(bench)
    assert after.serve(PROMPT) == len(PROMPT)
    assert after.target.num_run == 0


def test_a_lease_that_waits_for_the_disk_gets_no_lane():
    after = restarted(served(Bench(), num_generated=0))
    lease = after.lease([*PROMPT, 7])
    assert not after.prefixes.prepare(lease, [])
    assert lease.awaited
    assert not after.prefixes.prepare(lease, [])
    after.disk.deliver_all(after.prefixes)
    assert after.prefixes.prepare(lease, [])


def test_two_leases_read_the_same_node_once():
    after = restarted(served(Bench(), num_generated=0))
    first, second = after.lease(PROMPT), after.lease([*PROMPT, 7])
    for lease in (first, second):
        assert not after.prefixes.prepare(lease, [])
    after.disk.deliver_all(after.prefixes)
    assert len(after.disk.reads) == len(set(after.disk.reads))
    assert after.start(first, 0) == after.start(second, 1) == len(PROMPT)


@pytest.mark.parametrize(("fault", "stays"), [(FAULT, True), (GONE, False)])
def test_a_node_that_cannot_be_read_is_run_again(fault: Miss, stays: bool):
    after = restarted(served(Bench(), num_generated=0))
    num_files = len(after.disk.files)
    lease = after.lease(PROMPT)
    assert not after.prefixes.prepare(lease, [])
    while after.disk.jobs:
        after.disk.deliver(after.prefixes, fault)
    assert after.start(lease) == 0
    assert lease.restore.miss_reason == fault.reason
    assert (len(after.disk.files) == num_files) or not stays
    assert bool(after.ends("disk")) == stays


def test_a_passing_fault_does_not_keep_the_next_request_from_the_disk():
    after = restarted(served(Bench(), num_generated=0))
    lease = after.lease(PROMPT)
    after.prefixes.prepare(lease, [])
    while after.disk.jobs:
        after.disk.deliver(after.prefixes, FAULT)
    after.start(lease)
    after.prefixes.release(lease)
    assert after.serve(PROMPT) == len(PROMPT)


def test_the_rest_of_a_chain_that_broke_is_used():
    bench = served(Bench(interval_tokens=64), 100)
    after = restarted(bench)
    lease = after.lease(PROMPT, 100)
    last = max(after.index, key=lambda n: n.end)
    assert not after.prefixes.prepare(lease, [])
    del after.disk.files[last.key]
    while not after.prefixes.prepare(lease, []):
        after.disk.deliver(after.prefixes)
    assert after.start(lease) == 100


def test_the_miss_reason_is_reported():
    bench = Bench(memory_bytes=(len(PROMPT) - 20) * TOKEN_BYTES)
    bench.serve(PROMPT, 100, num_generated=0)
    lease = bench.lease(PROMPT, 100)
    assert bench.start(lease) == 100
    assert lease.restore.miss_reason == "no_memory"
    bench.prefixes.release(lease)
    other = bench.lease([*PROMPT[:100], *(7 for _ in PROMPT[100:])], 100)
    assert bench.start(other) == 100
    assert other.restore.miss_reason is None  # no more of it was run


def test_a_missing_state_is_distinguished_from_a_new_prompt():
    bench = Bench()
    bench.serve(PROMPT, 100)
    lease = bench.lease([*PROMPT[:-1], 7, 7], 100)
    assert bench.start(lease) == 100
    assert lease.restore.miss_reason == "no_state"


def test_nothing_is_read_without_room_in_memory():
    bench = served(Bench(), num_generated=0)
    num_bytes = len(PROMPT) * TOKEN_BYTES
    after = restarted(bench, memory_bytes=num_bytes - 1)
    lease = after.lease(PROMPT)
    assert after.start(lease) == 0
    assert lease.restore.miss_reason == "no_memory"
    assert not after.disk.reads


def test_files_that_vanish_under_a_running_prompt_are_written_again():
    """It was faster to run the prompt than to read it, so its parents are on disk alone."""
    after = restarted(served(Bench(), num_generated=0))
    lease = after.lease([*PROMPT, 7])
    lease.without_disk = True
    assert after.start(lease) == 0
    lease.path = [max(after.index, key=lambda n: n.end).key]
    lease.path_end = len(PROMPT)
    after.prefixes.files_changed([], [n.key for n in after.disk.nodes()])
    after.disk.files.clear()
    after.prefill(lease)
    after.end(lease, num_generated=5)
    after.disk.deliver_all(after.prefixes)
    assert restarted(after).serve([*lease.sequence, 7]) == len(lease.sequence)


# --- at the same time -------------------------------------------------------------------------


def test_the_second_of_two_equal_prompts_waits_for_the_first():
    bench = Bench()
    first, second = bench.lease(PROMPT), bench.lease(PROMPT)
    bench.start(first, 0)
    assert not bench.prefixes.prepare(second, [first])
    bench.prefill(first, 0)
    assert bench.start(second, 1) == len(PROMPT)


def test_it_waits_for_the_opening_of_the_answer_too():
    bench = Bench()
    first, second = bench.lease(PROMPT, OPENER), bench.lease(PROMPT, OPENER)
    bench.start(first, 0)
    bench.prefill(first, 0, until=OPENER - 64)
    assert not bench.prefixes.prepare(second, [first])
    bench.prefill(first, 0, begin=len(bench.target.lanes[0]))
    assert bench.start(second, 1) == len(PROMPT)


def test_it_runs_the_prompt_itself_if_the_first_one_leaves():
    bench = Bench()
    first, second = bench.lease(PROMPT), bench.lease(PROMPT)
    bench.start(first, 0)
    bench.prefill(first, 0, until=64)
    bench.end(first, lane=0)
    assert bench.start(second, 1) == 64


def test_a_prompt_that_shares_less_than_a_chunk_does_not_wait():
    bench = Bench()
    first, second = bench.lease(PROMPT), bench.lease([*PROMPT[:40], *[7] * 300])
    bench.start(first, 0)
    assert bench.prefixes.prepare(second, [first])


def test_the_status_counts_saves_restores_and_misses():
    bench = served(Bench())
    bench.serve(PROMPT)
    status = bench.prefixes.status
    assert status.restored_total == {"memory": 1, "disk": 0}
    assert status.restored_tokens_total["memory"] == len(PROMPT)
    assert status.missed_total["empty"] == 1
    assert status.num_nodes["disk"] == len(bench.disk.files)
