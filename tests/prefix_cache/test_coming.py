"""What a prompt may wait for, out of the prefills that run."""

from __future__ import annotations

import pytest

from luceasync.prefix_cache.cache import tokens_to_come
from luceasync.prefix_cache.lease import Lease
from tests.prompts import lease_of

OTHER = b"o" * 32


def planned(lease: Lease, *, recurrent: bool) -> Lease:
    limits = {"chunk_tokens": 256, "interval_tokens": 2048, "min_fork_tokens": 256}
    lease.plan_prefill(0, recurrent=recurrent, **limits)
    return lease


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
