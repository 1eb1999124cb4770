"""Files that nobody has asked for yet."""

from __future__ import annotations

from dataclasses import replace

from luceasync.prefix_cache.index import OwnerlessFiles
from tests.prefix_cache.test_node_index import node
from tests.prefix_tree.nodes import DISK


def test_bytes_are_those_of_the_nodes_that_are_here():
    ownerless, first, second = OwnerlessFiles(), node([1]), node([2])
    for one in (first, second, replace(first, num_bytes=200)):
        ownerless.add(one)
    assert (len(ownerless), ownerless.num_bytes) == (2, 210 + 110)
    for key in (second.key, second.key, b"another"):
        ownerless.discard(key)
    assert (list(ownerless), ownerless.num_bytes) == ([replace(first, num_bytes=200)], 210)


def test_an_end_goes_without_its_rows():
    ownerless, file = OwnerlessFiles(), replace(node([1]), state_tiers=DISK, state_bytes=50)
    ownerless.add(replace(file, tiers=DISK))
    ownerless.drop_end(file.key)
    assert ownerless.num_bytes == file.num_bytes
    assert not next(iter(ownerless)).state_tiers


def test_an_orphan_is_old_and_its_parent_nowhere():
    ownerless, root = OwnerlessFiles(), node([1], saved_at_s=5.0)
    lost = node([2], node([9]), saved_at_s=5.0)
    kept = [root, node([3], root, saved_at_s=5.0), node([4], node([8]), saved_at_s=50.0)]
    for one in (lost, *kept):
        ownerless.add(one)
    assert ownerless.orphans(set(), 10.0) == [lost.key]
    assert ownerless.orphans({lost.parent}, 10.0) == []
