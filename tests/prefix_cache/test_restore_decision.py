"""Restored or run again: what is faster, what fits, and what other prefills will save."""

from __future__ import annotations

import pytest

from luceasync.nodes import MissReason
from luceasync.prefix_cache.cache import tokens_to_come
from luceasync.prefix_cache.lease import Lease
from luceasync.prefix_tree import cost
from luceasync.prefix_tree.cost import Rates
from tests.prefix_cache.token_target import FAULT, STATE_BYTES, TOKEN_BYTES, Bench
from tests.prompts import lease_of

PROMPT = [1, 2, 3, 4] * 75
SLOW_DISK = Rates(disk_bytes_per_s=1.0, bus_bytes_per_s=1e9, prefill_tokens_per_s=1e6)
PREFILL_S = 10.0  # of the prompt, which no test waits for


def on_disk(**limits) -> Bench:
    """A server that finds the prompt on the disk."""
    bench = Bench()
    bench.serve(PROMPT, keep=True)
    bench.disk.deliver_all(bench.prefixes)
    return Bench(disk=bench.disk, **limits)


def test_what_was_not_measured_yet_is_restored():
    bench = on_disk()
    lease = bench.lease(PROMPT)
    assert not bench.prefixes.prepare(lease, [])
    assert (lease.decision, lease.fault) == ("not_measured", None)
    assert bench.disk.reads


def test_a_slow_disk_is_not_read_and_assumed_faster_next_time():
    bench = on_disk()
    decision = bench.prefixes._decision
    decision.rates = SLOW_DISK
    lease = bench.lease(PROMPT)
    assert bench.prefixes.prepare(lease, [])
    assert lease.fault is MissReason.PREFILL_IS_FASTER
    assert lease.match.num_tokens == 0 and not bench.disk.reads
    assert decision.rates.disk_bytes_per_s > SLOW_DISK.disk_bytes_per_s


@pytest.fixture
def few_bytes_show_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "LEAST_JUDGED_BYTES", 1)


@pytest.mark.usefixtures("few_bytes_show_a_rate")
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_a_prompt_waits_for_a_disk_only_as_long_as_the_rest_comes_sooner(share: float):
    """Once a tenth of the time has passed that running the prompt takes."""
    bench = on_disk()
    bench.prefixes._decision.rates = Rates(prefill_tokens_per_s=len(PROMPT) / PREFILL_S)
    lease = bench.lease(PROMPT)
    assert not bench.prefixes.prepare(lease, [])
    come = {key: round(share * lease.num_ordered_bytes) for key in lease.awaited}
    bench.prefixes.reading(come)
    assert lease.awaited, "it is too early to say"
    lease.started_s -= PREFILL_S / 10
    bench.prefixes.reading(come)
    if share == 0.5:
        assert lease.awaited and not bench.disk.given_up
        return
    assert sorted(bench.disk.given_up) == sorted(bench.disk.reads)
    assert bench.prefixes.prepare(lease, [])
    assert (lease.decision, lease.fault) == ("prefill_is_faster", MissReason.PREFILL_IS_FASTER)
    assert lease.match.num_tokens == 0


@pytest.mark.usefixtures("few_bytes_show_a_rate")
def test_what_another_prompt_waits_for_is_still_read():
    bench = on_disk()
    bench.prefixes._decision.rates = Rates(prefill_tokens_per_s=len(PROMPT) / PREFILL_S)
    first, second = bench.lease(PROMPT), bench.lease(PROMPT)
    assert not bench.prefixes.prepare(first, []) and not bench.prefixes.prepare(second, [])
    first.started_s -= PREFILL_S / 10
    bench.prefixes.reading({})
    assert not first.awaited and second.awaited and not bench.disk.given_up


@pytest.mark.usefixtures("few_bytes_show_a_rate")
def test_a_disk_that_was_slow_is_tried_for_a_long_prompt():
    bench = on_disk()
    slow = Rates(disk_bytes_per_s=1.0, bus_bytes_per_s=1e9, prefill_tokens_per_s=30.0)
    bench.prefixes._decision.rates = slow
    lease = bench.lease(PROMPT)
    assert not bench.prefixes.prepare(lease, [])
    assert lease.decision == "trial"


def test_a_disk_is_waited_for_as_long_as_running_the_tokens_could_take():
    bench = on_disk()
    bench.prefixes._decision.rates = Rates(prefill_tokens_per_s=len(PROMPT) / 4)
    bench.prefixes.prepare(bench.lease(PROMPT), [])
    assert bench.disk.timeouts_s
    assert bench.disk.timeouts_s == pytest.approx([8.0] * len(bench.disk.reads))


def test_what_memory_has_no_room_for_is_run_again():
    bench = on_disk(memory_bytes=len(PROMPT) * TOKEN_BYTES // 2 + STATE_BYTES)
    lease = bench.lease(PROMPT)
    assert bench.prefixes.prepare(lease, [])
    assert lease.fault is MissReason.NO_MEMORY


def test_what_memory_holds_needs_no_room(monkeypatch):
    bench = Bench()
    bench.serve(PROMPT)
    monkeypatch.setattr(bench.prefixes._leases, "make_room", lambda num_bytes: False)
    lease = bench.lease(PROMPT)
    assert bench.prefixes.prepare(lease, [])
    assert (lease.match.num_tokens, lease.fault) == (len(PROMPT), None)


def test_a_lease_does_not_read_again_from_a_disk_that_failed():
    bench = on_disk()
    lease = bench.lease(PROMPT)
    assert not bench.prefixes.prepare(lease, [])
    while lease.awaited:
        bench.disk.deliver(bench.prefixes, FAULT)
    assert bench.prefixes._decision.longest_match(lease).num_tokens == 0
    assert bench.prefixes._decision.longest_match(bench.lease(PROMPT)).num_tokens == len(PROMPT)


def test_a_prompt_is_looked_up_again_only_when_its_tree_has_changed():
    bench = Bench()
    bench.serve(PROMPT)
    lease, decision = bench.lease(PROMPT), bench.prefixes._decision
    found = decision.longest_match(lease)
    assert decision.longest_match(lease) is found
    [*_, last] = bench.prefixes.index.tree(lease.tenant)
    bench.prefixes.index.drop(last.key, "memory")
    assert decision.longest_match(lease).num_tokens < found.num_tokens


@pytest.mark.parametrize("is_slow", [False, True])
def test_known_tokens_are_not_saved_again_though_they_are_run(is_slow: bool):
    bench = on_disk()
    if is_slow:
        bench.prefixes._decision.rates = SLOW_DISK
    lease = bench.lease(PROMPT)
    known = bench.prefixes._decision.known_nodes(
        lease, bench.prefixes._decision.choose(lease, lease.match)
    )
    assert known[-1].end == len(PROMPT)


OTHER = b"o" * 32


def planned(lease: Lease, *, recurrent: bool) -> Lease:
    limits = {"chunk_tokens": 256, "interval_tokens": 2048, "min_fork_tokens": 256}
    lease.plan_prefill(0, recurrent=recurrent, **limits)
    return lease


@pytest.mark.parametrize(
    ("prompt", "recurrent", "expected"),
    [
        (range(1000), True, 1000),  # the same one: its logits come too
        ([*range(600), *range(5000, 5100)], True, 500),  # only where a state is saved
        ([*range(600), *range(5000, 5100)], False, 576),  # attention has all whole chunks
        (range(5000, 5100), False, 0),
    ],
)
def test_a_prompt_waits_for_what_a_running_one_will_save(prompt, recurrent, expected):
    running = planned(lease_of(range(1000), 500), recurrent=recurrent)
    assert tokens_to_come(lease_of(prompt), running, recurrent=recurrent) == expected


def test_no_prompt_waits_for_another_tenant():
    running = planned(lease_of(range(1000), tenant=OTHER), recurrent=True)
    assert tokens_to_come(lease_of(range(1000)), running, recurrent=True) == 0


def test_no_prompt_waits_for_a_finished_prefill():
    running = planned(lease_of(range(1000)), recurrent=True)
    running.cuts.clear()
    assert tokens_to_come(lease_of(range(1000)), running, recurrent=True) == 0
