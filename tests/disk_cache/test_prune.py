"""What is pruned: the longest unused first, and nothing that a kept node needs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from luceasync.disk_cache.listing import NodeMeta
from luceasync.disk_cache.upkeep import prunable
from tests.disk_cache.node_files import METADATA


def meta(key: str, parent: str, used_s: float, begin: int = 1, num_bytes: int = 10) -> NodeMeta:
    own = replace(METADATA, key=key, parent=parent, begin=begin if parent else 0, end=begin + 1)
    return NodeMeta("n", key, num_bytes, used_s, own)


def pruned(nodes: list[NodeMeta], **limits: float | None) -> list[str]:
    return [node.key for node in prunable(nodes, **limits)]


def test_a_parent_goes_after_its_children_however_old_it_is() -> None:
    nodes = [meta("root", "", 1), meta("a", "root", 5), meta("b", "root", 3)]
    assert pruned(nodes, budget_bytes=20) == ["b"]
    assert pruned(nodes, budget_bytes=10) == ["b", "a"]
    assert pruned(nodes, budget_bytes=0) == ["b", "a", "root"]
    assert pruned(nodes, unused_since_s=4) == ["b"]


def test_what_has_no_chain_to_the_root_goes_first() -> None:
    nodes = [meta("root", "", 1), meta("a", "gone", 9), meta("b", "a", 9, begin=2)]
    assert pruned(nodes, budget_bytes=20) == ["b"]
    assert pruned(nodes, budget_bytes=10) == ["b", "a"]


def placed(key: str, parent: str, begin: int, end: int, used_s: float = 9) -> NodeMeta:
    own = replace(METADATA, key=key, parent=parent, begin=begin, end=end)
    return NodeMeta("n", key, 10, used_s, own)


def test_files_that_lead_in_a_circle_go_first() -> None:
    circle = [placed("a", "b", 64, 128), placed("b", "a", 128, 192), placed("c", "c", 64, 128)]
    nodes = [*circle, meta("root", "", 1)]
    assert set(pruned(nodes, budget_bytes=10)) == {"a", "b", "c"}
    assert pruned(nodes, budget_bytes=0)[-1] == "root"


def test_a_node_of_another_schema_is_needed_by_nobody() -> None:
    nodes = [NodeMeta("n", "old", 10, 1), meta("root", "", 2)]
    assert pruned(nodes, budget_bytes=10) == ["old"]


def test_the_same_key_in_two_namespaces_is_two_nodes() -> None:
    nodes = [meta("root", "", 1), replace(meta("root", "", 2), namespace="m"), meta("a", "root", 3)]
    assert pruned(nodes, budget_bytes=20) == ["root"]


@given(
    parents=st.lists(st.integers(0, 30), max_size=30),
    budget_bytes=st.integers(0, 300),
    used_s=st.randoms(use_true_random=False),
)
def test_no_orphan_is_ever_left_and_the_budget_is_kept(parents, budget_bytes, used_s) -> None:
    nodes = [meta("0", "", 0)]
    for number, parent in enumerate(parents, 1):
        above = nodes[parent % number].key
        nodes.append(meta(str(number), above, used_s.random(), begin=number))
    gone = set(pruned(nodes, budget_bytes=budget_bytes))
    left = [node for node in nodes if node.key not in gone]
    assert {n.metadata.parent for n in left} <= {"", *(n.key for n in left)}
    assert sum(node.num_bytes for node in left) <= budget_bytes
    assert sum(node.num_bytes for node in left) + 10 > min(budget_bytes, 10 * len(nodes))
