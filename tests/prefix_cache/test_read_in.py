"""What memory adopts of the nodes that come from the disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luceasync.disk_cache.codec import NodePart, part_of
from luceasync.disk_cache.outcomes import Miss
from luceasync.errors import StageFailed
from luceasync.models.mixers import END_KINDS
from luceasync.nodes import MissReason
from luceasync.prefix_cache.disk_orders import FetchedNode, ReadOrder
from tests.prefix_cache.token_target import STATE_BYTES, TOKEN_BYTES, Bench

PROMPT = [1, 2, 3] * 40
WHOLE = frozenset({NodePart.SPAN, NodePart.STATE, NodePart.LOGITS})
SPAN = frozenset({NodePart.SPAN})


@pytest.fixture
def bench() -> Bench:
    """After a restart, with the files of one prompt; two nodes."""
    before = Bench()
    before.serve(PROMPT, 64, keep=True)
    before.disk.deliver_all(before.prefixes)
    after = Bench(disk=before.disk)
    after.index.tree(after.lease(PROMPT).tenant)
    return after


def last(bench: Bench) -> bytes:
    return max(bench.index, key=lambda n: n.end).key


def come(bench: Bench, *parts: NodePart, file_parts=WHOLE) -> Miss | None:
    """The last node comes, with these parts of it."""
    tensors = bench.disk.files[last(bench)].tensors
    chosen = {name: t for name, t in tensors.items() if part_of(name, END_KINDS) in parts}
    found = FetchedNode(chosen, frozenset(parts), file_parts, 1)
    return bench.prefixes._read_in.fetched(last(bench), found)


def test_only_the_last_node_of_a_chain_is_read_with_its_end(bench):
    lease = bench.lease(PROMPT)
    orders = bench.prefixes._read_in.orders(lease.match)
    assert [order.with_end for order in orders] == [False, True]
    expected = len(PROMPT) * TOKEN_BYTES + STATE_BYTES + 4 * 8
    assert bench.prefixes._read_in.num_bytes_of(orders) == expected


def test_a_node_on_its_way_is_counted_and_not_read_again(bench):
    read_in, order = bench.prefixes._read_in, ReadOrder(last(bench), with_end=True)
    read_in.begin([order])
    read_in.begin([order])
    assert bench.disk.reads == [order.key]
    assert read_in.num_bytes > 0
    assert read_in.num_bytes_of([order]) == 0
    bench.disk.deliver_all(bench.prefixes)
    assert read_in.num_bytes == 0
    assert bench.ends("memory") == {len(PROMPT): True}


def test_what_a_prefill_has_saved_meanwhile_is_not_replaced_by_less(bench):
    lease = bench.lease(PROMPT)
    lease.without_disk = True
    bench.start(lease)
    lease.path, lease.path_end = [], 0
    bench.prefill(lease)
    bench.prefixes.save_sequence(lease, 0, len(PROMPT))
    assert come(bench, NodePart.SPAN) is None
    assert bench.start(bench.lease(PROMPT), lane=1) == len(PROMPT)


def test_a_file_that_has_lost_its_end_is_known_to_have_none(bench):
    """Another server has written it, which did not need the state."""
    assert come(bench, NodePart.SPAN, file_parts=SPAN) is None
    assert bench.ends("disk") == {64: True, len(PROMPT): False}
    assert bench.serve(PROMPT) == 64


def test_a_node_of_another_model_is_quarantined(bench):
    key = last(bench)
    assert come(bench, NodePart.STATE).reason is MissReason.CORRUPT
    assert bench.disk.quarantined == [key]
    assert bench.serve(PROMPT) == 64


@pytest.mark.parametrize("error", [MemoryError("no room"), StageFailed(1, "it has ended")])
def test_a_node_that_memory_could_not_take_is_no_longer_listed_there(bench, monkeypatch, error):
    """Its rows were there; taking in its end as well has dropped them."""
    assert come(bench, NodePart.SPAN) is None
    key = last(bench)

    def adopt(node, span, tensors):
        bench.target.drop(node)
        raise error

    monkeypatch.setattr(bench.target, "adopt", adopt)
    if isinstance(error, MemoryError):
        assert come(bench, *WHOLE).reason is MissReason.NO_MEMORY
    else:
        with pytest.raises(StageFailed):
            come(bench, *WHOLE)
    assert bench.index.node(key).tiers == {"disk"}
    monkeypatch.undo()
    assert bench.serve(PROMPT) == len(PROMPT)


def test_a_node_that_was_dropped_meanwhile_is_not_adopted(bench):
    key, node = last(bench), bench.disk.files[last(bench)]
    bench.prefixes.files_changed([], [key])
    result = FetchedNode(node.tensors, WHOLE, WHOLE, 1)
    assert bench.prefixes._read_in.fetched(key, result).reason is MissReason.GONE
    assert not bench.ends("memory")


def test_a_node_with_other_tokens_is_quarantined(bench):
    node = bench.disk.files[last(bench)]
    other = {**node.tensors, "tokens": node.tensors["tokens"] + 1}
    bench.disk.files[node.key] = replace(node, tensors=other)
    assert bench.serve(PROMPT) == 64
    assert bench.disk.quarantined == [node.key]


def test_a_node_whose_lease_is_gone_does_not_stay_beyond_the_budget(bench):
    after = Bench(disk=bench.disk, memory_bytes=0, transit_bytes=2000)
    lease = after.lease(PROMPT)
    assert not after.prefixes.prepare(lease, [])
    after.prefixes.release(lease)
    after.disk.deliver_all(after.prefixes)
    assert after.disk.reads and after.index.num_bytes("memory") == 0
