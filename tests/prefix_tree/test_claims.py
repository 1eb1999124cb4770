"""Half of a tier at most is for conversations that go on, and the newest has its place anyway."""

from luceasync.prefix_tree.policy import granted, with_ancestors
from luceasync.prefix_tree.tree import Tree
from tests.prefix_tree.nodes import MEMORY, grow


def held(*chains):
    return {node.key: node for chain in chains for node in chain}


def test_paths_count_once_and_those_beyond_half_of_the_bytes_are_not_granted():
    tree = Tree()
    one = grow(tree, [1] * 10, [2] * 10)
    other = [one[0], *grow(Tree(), [1] * 10, [3] * 10)[1:]]
    third = grow(tree, [9] * 5)
    claims = [[chain[-1].key] for chain in (one, other, third)]
    by_key = held(one, other, third)
    assert granted(claims, by_key, "memory", 800) == {one[1].key, other[1].key, third[0].key}
    assert granted(claims, by_key, "memory", 600) == {one[1].key, other[1].key}
    assert granted(claims, by_key, "memory", 500) == {one[1].key, third[0].key}


def test_the_newest_is_granted_however_large_it_is():
    chain = grow(Tree(), [1] * 10, [2] * 10)
    assert granted([[chain[1].key]], held(chain), "memory", 1) == {chain[1].key}


def test_nodes_that_are_gone_claim_nothing():
    [node] = grow(Tree(), [1] * 10)
    assert granted([[b"gone"], [node.key]], held([node]), "memory", 1) == {node.key}


def test_only_what_the_tier_holds_counts():
    one, other = grow(Tree(), [1] * 10, tiers=MEMORY), grow(Tree(), [2] * 10, tiers=MEMORY)
    claims = [[one[0].key], [other[0].key]]
    assert len(granted(claims, held(one, other), "disk", 0)) == 2


def test_ancestors_end_where_nodes_are_unknown():
    chain = grow(Tree(), [1] * 10, [2] * 10)
    assert with_ancestors([chain[1].key], held(chain[1:])) == {chain[1].key}
