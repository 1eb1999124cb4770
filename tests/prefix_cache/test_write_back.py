"""What is written to the disk, and in which order."""

from __future__ import annotations

import pytest

from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.prefix_cache.tenants import NO_TENANT
from luceasync.prefix_cache.write_back import MAX_WRITING
from tests.prefix_cache.token_target import FAULT, GONE, Bench

PROMPT = [1] * 300
DISK_IS_FULL = GONE


def bench_with_turns(num_turns: int = 3, *, is_late: bool = False, **limits) -> Bench:
    """A conversation of which nothing is written yet."""
    bench, prompt = Bench(interval_tokens=64, **limits), PROMPT
    bench.target.late = ("save",) if is_late else ()
    for turn in range(num_turns):
        bench.serve(prompt, len(prompt), num_generated=8)
        prompt = [*prompt, *[turn] * 100]
    return bench


def parents(bench: Bench) -> list[bytes | None]:
    return [bench.disk.files[key].parent for key in bench.disk.written]


def test_a_parent_is_written_before_its_children():
    bench = bench_with_turns()
    bench.disk.deliver_all(bench.prefixes)
    there: set[bytes | None] = {None}
    for key in bench.disk.written:
        assert bench.disk.files[key].parent in there
        there.add(key)
    assert len(there) > 6


def test_only_a_few_are_handed_over_at_a_time():
    bench = bench_with_turns()
    bench.prefixes.hand_over()
    assert len(bench.disk.jobs) == MAX_WRITING
    assert not bench.prefixes.has_due_writes


def test_a_node_is_written_when_it_has_arrived_in_host_memory():
    bench = bench_with_turns(is_late=True)
    bench.prefixes.hand_over()
    assert not bench.disk.jobs
    assert not bench.prefixes.has_due_writes  # the ticket calls back
    bench.target.arrive()
    assert len(bench.disk.jobs) == MAX_WRITING


def test_a_server_that_ends_waits_for_nodes_on_their_way():
    bench = bench_with_turns(is_late=True)
    bench.prefixes.hand_over()
    bench.prefixes.hand_over(wait=True)
    assert len(bench.disk.jobs) > MAX_WRITING
    bench.target.arrive()
    bench.disk.deliver_all(bench.prefixes)
    assert len(bench.disk.written) == len(set(bench.disk.written))


def test_writes_to_a_busy_disk_are_repeated_in_order():
    bench = bench_with_turns()
    bench.prefixes.hand_over()
    bench.disk.deliver(bench.prefixes, FAULT)
    bench.disk.deliver_all(bench.prefixes)
    for key, parent in zip(bench.disk.written, parents(bench), strict=True):
        assert parent is None or parent in bench.disk.files, key


def test_children_of_an_unwritten_node_are_not_written():
    bench = bench_with_turns(1)
    bench.prefixes.hand_over()
    bench.disk.deliver(bench.prefixes, DISK_IS_FULL)
    bench.disk.deliver_all(bench.prefixes)
    assert not bench.disk.files
    assert not bench.ends("disk")


def test_the_next_turn_writes_both():
    bench = bench_with_turns(1)
    bench.prefixes.hand_over()
    bench.disk.deliver(bench.prefixes, DISK_IS_FULL)
    bench.disk.deliver_all(bench.prefixes)
    bench.serve([*PROMPT, 2], num_generated=8)
    bench.disk.deliver_all(bench.prefixes)
    assert min(bench.ends("disk")) < len(PROMPT) < max(bench.ends("disk"))


@pytest.mark.parametrize("num_tokens", [255, 256])
def test_a_node_too_short_for_a_file_waits_for_its_children(num_tokens: int):
    bench = Bench(min_disk_tokens=256)
    bench.serve([1] * 200, num_generated=4)
    assert not bench.prefixes.has_due_writes
    bench.serve([1] * num_tokens)
    bench.disk.deliver_all(bench.prefixes)
    assert bool(bench.disk.files) == (num_tokens == 256)
    if bench.disk.files:
        assert min(bench.ends("disk")) == CHUNK_TOKENS or 200 in bench.ends("disk")


def test_a_lost_file_is_written_again_for_its_children():
    bench = bench_with_turns()
    bench.disk.deliver_all(bench.prefixes)
    first = bench.disk.written[0]
    del bench.disk.files[first]
    bench.prefixes.files_changed([], [first])
    bench.disk.deliver_all(bench.prefixes)
    assert first in bench.disk.files


def test_a_lost_leaf_is_not_written_again():
    bench = bench_with_turns(1)
    bench.disk.deliver_all(bench.prefixes)
    leaf = bench.disk.written[-1]
    del bench.disk.files[leaf]
    bench.prefixes.files_changed([], [leaf])
    assert not bench.prefixes.has_due_writes


def test_the_file_of_a_node_dropped_while_it_was_written_is_removed():
    bench = Bench()
    bench.serve(PROMPT, num_generated=4)
    bench.prefixes.hand_over()
    root = next(n for n in bench.index if n.parent is None)
    bench.index.drop(root.key, "memory")
    bench.disk.deliver_all(bench.prefixes)
    assert not bench.disk.files


def test_without_a_disk_nothing_is_queued():
    bench = bench_with_turns(disk_bytes=None)
    assert not bench.prefixes.has_due_writes
    assert not bench.disk.jobs


def test_the_outcome_for_a_dropped_node_is_accepted():
    bench = bench_with_turns(1)
    bench.prefixes.hand_over()
    while bench.disk.jobs:
        bench.disk.deliver(bench.prefixes, GONE)
    assert not bench.ends("disk")


def test_rows_are_written_before_their_end_and_once():
    bench = bench_with_turns()
    bench.disk.deliver_all(bench.prefixes)
    assert len(bench.disk.written) == len(set(bench.disk.written))
    assert set(bench.disk.ends_written) < set(bench.disk.written)


def test_a_state_is_added_to_what_the_disk_has_without_its_rows():
    bench = bench_with_turns(1)
    bench.disk.deliver_all(bench.prefixes)
    tip = max((n for n in bench.index if "disk" in n.state_tiers), key=lambda n: n.end)
    bench.index.tree(NO_TENANT).drop_state(tip.key, "disk")
    bench.disk.written.clear()
    bench.disk.ends_written.clear()
    bench.prefixes._write_back.add(bench.index.node(tip.key), with_end=True)
    bench.disk.deliver_all(bench.prefixes)
    assert (bench.disk.written, bench.disk.ends_written) == ([], [tip.key])
    assert "disk" in bench.index.node(tip.key).state_tiers


def test_an_end_whose_rows_could_not_be_written_is_not_written():
    bench = bench_with_turns(1)
    bench.prefixes.hand_over()
    while bench.disk.jobs:
        bench.disk.deliver(bench.prefixes, DISK_IS_FULL)
        bench.prefixes.hand_over()
    assert not bench.disk.ends_written
    assert not len(bench.prefixes._write_back)
