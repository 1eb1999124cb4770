"""What a generation keeps of its prompt, and what it may wait for."""

from __future__ import annotations

from array import array

import pytest

from luceasync.keeping.lease import Lease, plan_prefill, tokens_to_come
from luceasync.prefix.policy import Cut

TENANT, OTHER = b"t" * 32, b"o" * 32


def lease_of(prompt, *boundaries: int, tenant=TENANT) -> Lease:
    return Lease(tenant, array("i", prompt), len(prompt), boundaries, keep_prompt=False)


def planned(lease: Lease, begin: int = 0, *, recurrent: bool, interval_tokens=2048) -> Lease:
    plan_prefill(
        lease, begin, recurrent=recurrent, chunk_tokens=256, interval_tokens=interval_tokens
    )
    return lease


def test_a_recurrent_prompt_is_kept_where_chunks_end():
    lease = planned(lease_of(range(1000), 100, 990), recurrent=True, interval_tokens=300)
    assert lease.splits == (100,)
    ends = [cut.end for cut in lease.cuts]
    assert ends == [100, 256, 512, 768, 1000]


def test_attention_is_kept_at_the_turns_end_itself():
    lease = planned(lease_of(range(1000), 500), recurrent=False)
    assert list(lease.cuts) == [Cut(500, is_turn_end=True), Cut(1000, is_turn_end=False)]
    assert lease.splits == ()


def test_what_is_kept_already_is_not_kept_again():
    lease = lease_of(range(1000), 500)
    lease.path_end = 600  # known, but run again
    assert [cut.end for cut in planned(lease, recurrent=False).cuts] == [1000]


@pytest.mark.parametrize(
    ("prompt", "recurrent", "expected"),
    [
        (range(1000), True, 1000),  # the same one: its logits come too
        ([*range(600), *range(5000, 5100)], True, 500),  # a state is only where it is kept
        ([*range(600), *range(5000, 5100)], False, 576),  # attention has all whole chunks
        (range(5000, 5100), False, 0),
    ],
)
def test_who_shares_a_prompt_that_runs_waits_for_what_it_will_keep(prompt, recurrent, expected):
    running = planned(lease_of(range(1000), 500), recurrent=recurrent)
    assert tokens_to_come(lease_of(prompt), running, recurrent=recurrent) == expected


def test_nobody_waits_for_another_tenant():
    running = planned(lease_of(range(1000), tenant=OTHER), recurrent=True)
    assert tokens_to_come(lease_of(range(1000)), running, recurrent=True) == 0


def test_nobody_waits_for_a_prompt_that_is_through():
    running = planned(lease_of(range(1000)), recurrent=True)
    running.cuts.clear()
    assert tokens_to_come(lease_of(range(1000)), running, recurrent=True) == 0
