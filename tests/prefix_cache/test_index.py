"""Which nodes are held for which tenant, and what is evicted."""

from __future__ import annotations

import time
from array import array
from dataclasses import replace

import pytest

from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.nodes import NodeKey
from luceasync.prefix_cache import index as module
from luceasync.prefix_cache.index import (
    ORPHAN_AGE_S,
    EvictionMisses,
    Limits,
    NodeIndex,
    OwnerlessFiles,
    Retention,
)
from luceasync.prefix_tree.node import Node, node_key, pack_tokens, tenant_key
from tests.prefix_cache.token_target import DISK, MEMORY

TENANT, OTHER = tenant_key("one"), tenant_key("two")


class Body:
    """Memory and disk at once: records its calls."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.stateless: list[str] = []
        self.removed: list[bytes] = []
        self.removed_of_others: list[int] = []

    def drop(self, node: str, *, state_only: bool = False) -> None:
        (self.stateless if state_only else self.dropped).append(node)

    def remove(self, keys) -> None:
        self.removed.extend(keys)

    def remove_others(self, num_bytes: int) -> None:
        self.removed_of_others.append(num_bytes)


@pytest.fixture
def body() -> Body:
    return Body()


@pytest.fixture
def held(body: Body) -> NodeIndex:
    return NodeIndex(body, body, Limits(1000, disk_bytes=1000), recurrent=True)


def node(tokens, parent: Node | None = None, *, tenant=TENANT, tiers=DISK, **fields) -> Node:
    packed = pack_tokens(tokens)
    key = node_key(packed, tenant, None if parent is None else parent.key)
    return Node(
        key=key,
        parent=None if parent is None else parent.key,
        begin=0 if parent is None else parent.end,
        tokens=packed,
        **{"tiers": tiers, "state_tiers": tiers, "num_bytes": 100, "state_bytes": 10, **fields},
    )


def chain(held: NodeIndex, length: int, **fields) -> list[Node]:
    nodes: list[Node] = []
    for i in range(length):
        nodes.append(node([i] * 10, nodes[-1] if nodes else None, **fields))
        held.insert(TENANT, nodes[-1])
    return nodes


def needed(*nodes: Node, ends=()) -> Retention:
    return Retention({n.key for n in nodes}, {n.key for n in ends})


def test_files_wait_for_their_tenant(held):
    mine = node([1])
    held.files_changed([mine, node([1], tenant=OTHER)], [])
    assert [n.key for n in held.tree(TENANT)] == [mine.key]
    assert held.num_bytes("disk") == 220


def test_a_file_that_continues_a_known_node_is_found_later(held):
    root = node([1])
    held.insert(TENANT, root)
    held.files_changed([node([2], root)], [])  # another server wrote it
    assert len(list(held)) == 2


def test_a_file_waits_for_its_parent(held):
    root = node([1])
    leaf = node([2], root, saved_at_s=time.time())
    held.files_changed([leaf, node([7], tenant=OTHER)], [])
    assert not list(held.tree(TENANT))
    held.files_changed([root], [])
    assert {n.key for n in held.tree(TENANT)} == {root.key, leaf.key}


def test_a_file_of_an_unknown_tenant_is_checked_once(held, monkeypatch):
    hashed: list[int] = []
    monkeypatch.setattr(module, "node_key", lambda *node: hashed.append(1) or node_key(*node))
    held.tree(TENANT)
    strange = [node([i], tenant=OTHER) for i in range(5)]
    held.files_changed(strange, [])
    held.files_changed([node([9])], [])
    assert len(hashed) == 6
    assert len(list(held.tree(OTHER))) == 5


def test_a_file_that_is_not_what_its_name_says_changes_nothing(held):
    root = node([1])
    held.insert(TENANT, root)
    held.files_changed([replace(root, tokens=pack_tokens([7]))], [])
    assert held.node(root.key) == root


def test_a_replaced_file_has_its_new_content(held):
    root = node([1])
    held.insert(TENANT, root)
    held.files_changed([replace(root, state_tiers=frozenset())], [])
    assert not held.node(root.key).has_state


def test_descendants_go_with_a_node(held, body):
    first, second, third = chain(held, 3)
    held.insert(TENANT, replace(third, tiers=MEMORY, state_tiers=MEMORY))
    held.drop(first.key, "disk")
    assert not list(held)
    assert body.removed == [second.key, third.key]  # the first one's file is gone already
    assert third.key in body.dropped


def test_a_node_that_another_tier_holds_stays(held, body):
    [root] = chain(held, 1, tiers=MEMORY | DISK)
    held.drop(root.key, "memory")
    assert held.node(root.key).tiers == DISK
    assert body.dropped == [root.key]
    assert not body.removed


def test_leaves_are_evicted_and_never_nodes_in_use(held, body):
    nodes = chain(held, 9, tiers=MEMORY)
    assert held.make_room(100, needed(*nodes[7:8], ends=nodes))
    assert set(body.dropped) == {nodes[8].key}
    assert not held.make_room(300, needed(*nodes[7:8], ends=nodes))


def test_states_that_are_not_needed_are_evicted(held, body):
    nodes = chain(held, 9, tiers=MEMORY)
    assert held.make_room(30, needed(nodes[8]))
    assert body.dropped == [] and nodes[8].key not in body.stateless
    assert {n.key for n in held if not n.has_state} == set(body.stateless)
    assert held.num_bytes("memory") <= 970


def test_more_is_evicted_for_a_hole_unless_there_is_plenty_of_room(held):
    nodes = chain(held, 5, tiers=MEMORY)  # 550 of 1000 bytes
    assert held.make_hole(300, needed(nodes[1], ends=nodes))
    assert [n.key for n in held] == [n.key for n in nodes[:2]]
    assert not held.make_hole(100, needed())
    assert len(list(held)) == 2


def test_a_request_beyond_the_budget_evicts_nothing(held, body):
    chain(held, 9, tiers=MEMORY)
    assert not held.make_room(1001, needed())
    assert not body.dropped


def test_files_beyond_the_budget_are_removed_but_not_those_just_written(held, body, monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda: 1000.0)
    old = chain(held, 6, saved_at_s=10.0)
    young = node([99] * 10, old[-1], saved_at_s=990.0)
    other = [node([50 + i], saved_at_s=20.0) for i in range(4)]
    for n in [young, *other]:
        held.insert(TENANT, n)
    held.shrink(needed())
    assert held.num_bytes("disk") <= 1000
    assert body.removed
    assert set(body.removed) <= {n.key for n in other}


def test_states_between_turns_are_thinned(held, body):
    nodes = chain(held, 9, tiers=MEMORY)
    held.thin([n.key for n in nodes], {nodes[0].key})
    gone = set(body.stateless)
    assert gone
    assert nodes[8].key not in gone
    assert nodes[0].key not in gone
    assert all(not held.node(name).has_state for name in gone)


def test_a_state_where_branches_part_stays(held, body):
    nodes = chain(held, 9, tiers=MEMORY)
    held.insert(TENANT, node([77], nodes[2], tiers=MEMORY))
    held.thin([n.key for n in nodes], set())
    assert nodes[2].key not in body.stateless


def test_old_files_without_a_parent_are_collected(held, body, monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda: 2 * ORPHAN_AGE_S)
    lost = node([2], node([1]), saved_at_s=1.0)
    fresh = node([3], node([1]), saved_at_s=1.5 * ORPHAN_AGE_S)
    held.files_changed([lost, fresh], [], is_whole=False)  # their parents may be unreadable now
    assert body.removed == []
    held.files_changed([], [])
    assert body.removed == [lost.key]


NODE = NodeKey(b"n" * 32)
TOKENS = array("i", range(3 * CHUNK_TOKENS))


def test_an_eviction_miss_is_found_by_its_first_tokens():
    misses = EvictionMisses()
    misses.add((TENANT, NODE), TOKENS)
    assert misses.matches((TENANT, NODE), TOKENS[: CHUNK_TOKENS + 1])
    assert not misses.matches((TENANT, NODE), TOKENS[1:])
    assert not misses.matches((TENANT, NODE), TOKENS[: CHUNK_TOKENS - 1])
    assert not misses.matches((TENANT, None), TOKENS)
    assert not misses.matches((OTHER, NODE), TOKENS)


def test_only_the_newest_eviction_misses_are_remembered():
    misses = EvictionMisses(max_entries=2)
    for tenant in (TENANT, OTHER, TENANT, b"x" * 32):
        misses.add((tenant, None), TOKENS)
    assert len(misses) == 2
    assert misses.matches((TENANT, None), TOKENS)
    assert not misses.matches((OTHER, None), TOKENS)


def test_bytes_count_the_ownerless_files():
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


NOBODY = Retention(frozenset(), frozenset())


def test_other_models_files_count_towards_the_budget_of_the_directory(held, body):
    now = time.time()
    held.others.replace([(now - 900, 600), (now - 100, 200)], 0)
    assert held.make_file_room(150, NOBODY)
    assert not body.removed_of_others
    assert held.make_file_room(300, NOBODY)
    assert body.removed_of_others == [100 + 14]  # and 2 % of what may lie there
    assert held.others.num_bytes == 800 - 114
    assert held.num_bytes("disk") == 0


def test_between_models_the_last_use_decides(held, body):
    now = time.time()
    held.tree(TENANT)
    own = node([1], num_bytes=400, last_used_s=now - 500, saved_at_s=now - 500)
    held.insert(TENANT, own)
    held.others.replace([(now - 100, 300), (now - 900, 300)], 0)
    assert held.make_file_room(200, NOBODY)
    assert body.removed_of_others == [226] and not body.removed
    assert held.make_file_room(500, NOBODY)
    assert body.removed == [own.key]
    assert body.removed_of_others[0] + sum(body.removed_of_others[1:]) < 600


def test_what_this_model_must_keep_is_made_up_for_by_other_models(held, body):
    now = time.time()
    own = node([1], num_bytes=400, last_used_s=now - 900, saved_at_s=now - 900)
    held.insert(TENANT, own)
    held.others.replace([(now - 100, 600)], 0)
    keep = Retention(frozenset({own.key}), frozenset({own.key}))
    assert held.make_file_room(300, keep)
    assert body.removed_of_others == [324] and not body.removed
    assert not held.make_file_room(700, keep)
    assert len(body.removed_of_others) == 1


def test_young_files_of_other_models_go_if_nothing_older_makes_room(held, body):
    held.others.replace([(time.time(), 900)], 0)
    held.shrink(NOBODY)
    assert held.make_file_room(300, NOBODY)
    assert body.removed_of_others == [214]


def test_other_models_files_leave_memory_alone(held, body):
    held.others.replace([(0.0, 10_000)], 0)
    assert held.make_room(1000, NOBODY)
    assert not body.removed_of_others


def test_a_scan_from_before_a_removal_does_not_count_its_files_again(held, body):
    files = [(time.time() - 900, 600), (time.time() - 100, 600)]
    held.others.replace(files, 0)
    assert held.make_file_room(0, NOBODY)
    held.others.replace(files, 0)
    assert held.make_file_room(0, NOBODY)
    assert len(body.removed_of_others) == 1
    held.others.replace(files[1:], 1)
    assert held.others.num_bytes == 600
