"""The longest usable prefix, as brute force finds it; and a tree that stays consistent."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.prefix_tree.node import TIERS, common_prefix, pack_tokens
from luceasync.prefix_tree.tree import Siblings, Tree, parents_first
from tests.prefix_tree.nodes import BOTH, DISK, MEMORY, grow, make, serve
from tests.reference import prefix as truth

TIER_SETS = st.sampled_from([MEMORY, DISK, BOTH])
SPAN = st.lists(st.integers(0, 1), min_size=1, max_size=7)


@st.composite
def trees(draw) -> Tree:
    """Up to 25 nodes over two tokens, held here and there; some have been removed again."""
    tree = Tree()
    for span in draw(st.lists(SPAN, max_size=25)):
        parent = draw(st.sampled_from([None, *tree]))
        tiers = draw(TIER_SETS)
        state, logits = draw(TIER_SETS) & tiers, draw(TIER_SETS) & tiers
        tree.insert(make(parent, span, tiers=tiers, state_tiers=state, logits_tiers=logits))
    for key in [node.key for node in tree if draw(st.integers(0, 9)) == 0]:
        for tier in draw(TIER_SETS):
            if key in tree and tier in tree[key].tiers:
                tree.remove(key, tier)
    return tree


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(trees(), st.data(), st.booleans(), st.integers(1, 4), TIER_SETS)
def test_match_is_what_brute_force_finds(tree, data, recurrent, chunk_tokens, tiers):
    known = [[t for n in tree.chain(node.key) for t in n.tokens] for node in tree]
    prompt = data.draw(st.sampled_from([[], *known])) + data.draw(st.lists(st.integers(0, 1)))
    need = {"recurrent": recurrent, "chunk_tokens": chunk_tokens, "tiers": tiers}
    match = tree.match(prompt, **need)
    found = match.exact, match.num_tokens, match.num_shared_tokens
    assert found == truth.longest(tree, prompt, **need)
    assert (match.miss_reason is None) == (match.num_tokens > 0)
    assert_chain_is(match, prompt)


def assert_chain_is(match, prompt) -> None:
    """The matched nodes give the first tokens of the prompt, one after the other."""
    nodes = (*match.nodes, *([match.part] if match.part else []))
    assert [n.begin for n in nodes] == [0, *[n.end for n in nodes]][: len(nodes)]
    tokens = [token for n in nodes for token in n.tokens]
    assert tokens[: match.num_tokens] == prompt[: match.num_tokens]
    assert match.part or match.num_tokens == len(tokens)


def test_attention_takes_whole_nodes_and_whole_chunks_of_the_next():
    tree = Tree()
    first, second = grow(tree, range(100), range(1000, 1200))
    match = tree.match([*range(100), *range(1000, 1100), 7], recurrent=False)
    assert (match.nodes, match.part, match.num_tokens) == ((first,), second, 192)


def test_recurrent_takes_the_deepest_node_with_a_state():
    tree = Tree()
    first = tree.insert(make(None, range(100), state_tiers=MEMORY))
    tree.insert(make(first, range(100, 300)))
    match = tree.match([*range(300), 7], recurrent=True)
    assert (match.nodes, match.num_tokens, match.num_shared_tokens) == ((first,), 100, 300)


def test_a_prompt_that_ends_with_a_node_and_its_logits_needs_no_run():
    tree = Tree()
    grow(tree, range(100), range(100, 130), logits_tiers=MEMORY, state_tiers=MEMORY)
    for recurrent in (False, True):
        match = tree.match(range(130), recurrent=recurrent)
        assert match.exact and match.num_tokens == 130


def test_without_logits_the_last_token_is_left_to_run():
    tree = Tree()
    grow(tree, range(100), range(100, 192), state_tiers=MEMORY)
    assert tree.match(range(192), recurrent=False).num_tokens == 128
    assert tree.match(range(192), recurrent=True).num_tokens == 100


def test_branches_that_part_inside_a_node_are_siblings_and_the_better_one_wins():
    tree = Tree()
    (short,) = grow(tree, [*range(100), *[1] * 100])
    (longer,) = grow(tree, [*range(150), *[2] * 100])
    match = tree.match([*range(150), *[3] * 9], recurrent=False)
    assert (match.part, match.num_tokens) == (longer, 128)
    assert tree.match([*range(70), *[3] * 9], recurrent=False).part in (short, longer)


@pytest.mark.parametrize(("halves", "whole"), [(DISK, MEMORY), (MEMORY, DISK)])
def test_of_two_ways_to_the_same_place_the_one_in_memory_is_taken(halves, whole):
    tree = Tree()
    grow(tree, range(64), range(64, 128), tiers=halves)
    grow(tree, range(128), tiers=whole)
    assert all(n.tiers == MEMORY for n in tree.match([*range(128), 7], recurrent=False).nodes)


def test_a_search_can_be_limited_to_memory():
    tree = Tree()
    (first,) = grow(tree, range(64), tiers=BOTH)
    grow(tree, range(64), range(64, 128), tiers=DISK)
    match = tree.match(range(200), recurrent=False, tiers=MEMORY)
    assert (match.nodes[0].key, match.num_tokens) == (first.key, 64)


@pytest.mark.parametrize("field", ["state_tiers", "logits_tiers"])
def test_what_only_the_disk_holds_is_no_use_without_it(field):
    tree = Tree()
    held = {"state_tiers": BOTH, "logits_tiers": BOTH, field: DISK}
    grow(tree, range(64), tiers=BOTH, **held)
    assert tree.match(range(64), recurrent=True).exact
    assert tree.match(range(64), recurrent=True, tiers=MEMORY).num_tokens == 0


@pytest.mark.parametrize("chunk_tokens", [None, 256])
def test_each_of_ten_turns_runs_its_own_tokens_only(chunk_tokens):
    tree, history = Tree(), []
    for turn in range(10):
        prompt = [*history, *range(turn * 10000, turn * 10000 + 3000)]
        match = serve(tree, prompt, [len(history), len(prompt)], chunk_tokens=chunk_tokens)
        assert match.num_tokens == len(history)
        history = [*prompt, *range(turn * 10000 + 3000, turn * 10000 + 3200)]
        assert not serve(tree, history, [len(history)], chunk_tokens=chunk_tokens).exact
    assert sum(len(node.tokens) for node in tree) == len(history)


@pytest.mark.parametrize(("chunk_tokens", "reused"), [(None, 3000), (256, 2816)])
def test_five_branches_share_one_system_prompt(chunk_tokens, reused):
    tree, system = Tree(), range(3000)
    for branch in range(5):
        prompt = [*system, *[9000 + branch] * 700]
        match = serve(tree, prompt, [3000], chunk_tokens=chunk_tokens)
        assert match.num_tokens == (reused if branch else 0)
    saved = sum(len(node.tokens) for node in tree)
    assert saved == reused + 5 * (3000 - reused + 700)


@pytest.mark.parametrize(
    ("saved", "prompt", "recurrent", "reason"),
    [
        ([], [1, 2], False, "empty"),
        ([5] * 100, [1, 2], False, "no_common_prefix"),
        ([5] * 100, [5] * 60, False, "too_short"),
        ([5] * 100, [5] * 200, True, "no_state"),
    ],
)
def test_a_miss_says_why(saved, prompt, recurrent, reason):
    tree = Tree()
    grow(tree, *[saved] * bool(saved))
    assert tree.match(prompt, recurrent=recurrent).miss_reason == reason


def test_keys_that_collide_give_no_wrong_prefix():
    tree = Tree()
    (node,) = grow(tree, [1] * 100)
    with pytest.raises(ValueError, match="are not the tokens that have this key"):
        tree.insert(replace(node, tokens=pack_tokens([2] * 100)))
    assert tree.match([2] * 200, recurrent=False).num_tokens == 0


BAD = {
    "is not here": {"parent": b"missing"},
    "its parent ends at 100": {"begin": 99},
    "has the same tokens": {"key": b"another", "tokens": pack_tokens([8] * 5)},
    "is not empty": {"tokens": pack_tokens([])},
    "the first must hold the others": {"state_tiers": DISK},
    "begins at 0 without a parent": {"parent": None},
}


@pytest.mark.parametrize("words", BAD)
def test_what_does_not_fit_is_refused_and_changes_nothing(words):
    tree = Tree()
    first, _ = grow(tree, [7] * 100, [8] * 5)
    before = repr(tree)
    with pytest.raises(ValueError, match=words):
        tree.insert(replace(make(first, [9]), **BAD[words]))
    assert repr(tree) == before


def test_a_node_that_comes_again_gains_its_tiers():
    tree = Tree()
    (node,) = grow(tree, [1] * 10, hits=3, last_used_s=5.0, state_tiers=MEMORY)
    now = tree.insert(make(None, [1] * 10, tiers=DISK, logits_tiers=DISK, saved_at_s=9.0))
    assert (now.tiers, now.state_tiers, now.logits_tiers) == (BOTH, MEMORY, DISK)
    assert (now.hits, now.last_used_s, now.saved_at_s) == (3, 5.0, 9.0)
    assert tree[node.key] == now


def test_a_hit_is_counted_and_time_runs_forwards():
    tree = Tree()
    (node,) = grow(tree, [1] * 10, last_used_s=5.0)
    tree.touch([node.key], 8.0)
    tree.touch([node.key], 7.0)
    assert (tree[node.key].hits, tree[node.key].last_used_s) == (2, 8.0)


def test_every_change_is_counted_so_that_a_match_can_be_reused():
    tree = Tree()
    counts = [tree.num_changes]
    (node,) = grow(tree, [1] * 10, tiers=BOTH, state_tiers=BOTH)
    counts.append(tree.num_changes)
    for change in (
        lambda: tree.touch([node.key], 1.0),
        lambda: tree.drop_state(node.key, "disk"),
        lambda: tree.remove(node.key, "disk"),
        lambda: tree.remove(node.key, "memory"),
    ):
        change()
        counts.append(tree.num_changes)
    assert counts == sorted(set(counts))


def test_a_dropped_state_takes_the_logits_along():
    tree = Tree()
    (node,) = grow(tree, [1] * 10, tiers=BOTH, state_tiers=BOTH, logits_tiers=BOTH)
    now = tree.drop_state(node.key, "memory")
    assert (now.tiers, now.state_tiers, now.logits_tiers) == (BOTH, DISK, DISK)
    assert (tree.num_bytes("memory"), tree.num_bytes("disk")) == (100, 200)


def test_a_node_stays_while_a_tier_holds_it():
    tree = Tree()
    first, _ = grow(tree, [1] * 10, [2] * 10, tiers=BOTH, state_tiers=BOTH)
    assert tree.remove(first.key, "memory") == []
    assert (tree[first.key].tiers, tree[first.key].state_tiers) == (DISK, DISK)


def test_descendants_go_with_a_removed_node():
    tree = Tree()
    chain = grow(tree, [1] * 10, [2] * 10, [3] * 10, tiers=DISK)
    (other,) = grow(tree, [4])
    assert tree.remove(chain[0].key, "disk") == chain
    assert list(tree) == [other]
    assert (tree.num_bytes("disk"), tree.num_bytes("memory")) == (0, 10)


def test_a_parent_that_loses_its_only_child_is_a_leaf():
    tree = Tree()
    first, second = grow(tree, [1], [2])
    tree.remove(second.key, "memory")
    assert tree.children(first.key) == [] and "1 nodes, 1 leaves" in repr(tree)


@settings(deadline=None)
@given(trees())
def test_bytes_and_counts_are_those_of_the_nodes(tree):
    for tier in TIERS:
        assert tree.num_bytes(tier) == sum(node.bytes_in(tier) for node in tree)
        assert tree.num_nodes(tier) == sum(tier in node.tiers for node in tree)


@pytest.mark.slow
@settings(deadline=None)
@given(trees(), st.randoms())
def test_a_tree_is_rebuilt_from_its_nodes_in_any_order(tree, random):
    nodes = list(tree)
    random.shuffle(nodes)
    rooted, orphans = parents_first(nodes)
    again = Tree()
    assert [again.insert(node) for node in rooted] == rooted and orphans == []
    assert {n.key for n in again} == {n.key for n in tree}


def test_nodes_without_a_chain_to_the_root_are_orphans():
    first, second, third = grow(Tree(), [1], [2], [3])
    assert parents_first([third, first]) == ([first], [third])
    assert parents_first([third, second]) == ([], [second, third])


def test_the_tree_says_what_it_holds():
    tree = Tree()
    grow(tree, [1] * 3, [2] * 4, tiers=BOTH)
    grow(tree, [5])
    assert repr(tree) == "Tree(3 nodes, 2 leaves; memory: 3 nodes 80 bytes, disk: 2 nodes 70 bytes)"


def test_chain_and_children_follow_the_nodes():
    tree = Tree()
    chain = grow(tree, [1], [2], [3])
    assert tree.chain(chain[2].key) == tuple(chain) and tree.chain(None) == ()
    assert tree.children(chain[0].key) == [chain[1]] and tree.children(None) == [chain[0]]
    assert chain[1].key in tree and b"missing" not in tree


SPANS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), unique=True, max_size=20
)
PROMPT = st.lists(st.integers(0, 2), max_size=10)


def build(spans: list[tuple[int, ...]]) -> Siblings:
    siblings = Siblings()
    for span in spans:
        siblings.add(pack_tokens(span), bytes(span))
    return siblings


@pytest.mark.slow
@given(SPANS, PROMPT)
def test_whole_children_are_prefixes_of_the_prompt(spans, prompt):
    expected = {bytes(span) for span in spans if list(span) == prompt[: len(span)]}
    found = build(spans).whole(pack_tokens(prompt))
    assert set(found) == expected and len(found) == len(expected)


@pytest.mark.slow
@given(SPANS, PROMPT, st.sets(st.integers(0, 19)))
def test_the_longest_part_is_the_longest_among_the_usable(spans, prompt, hidden):
    usable = {bytes(span) for i, span in enumerate(spans) if i not in hidden}
    packed = pack_tokens(prompt)
    shared = {key: common_prefix(pack_tokens(list(key)), packed) for key in usable}
    key, num_tokens = build(spans).longest_part(packed, usable.__contains__)
    assert num_tokens == max(shared.values(), default=0)
    assert key is None if num_tokens == 0 else shared[key] == num_tokens


@pytest.mark.slow
@given(SPANS, st.data())
def test_what_is_discarded_is_found_no_more(spans, data):
    siblings = build(spans)
    left = [span for span in spans if data.draw(st.booleans())]
    for span in set(spans) - set(left):
        siblings.discard(pack_tokens(span))
    assert sorted(siblings.keys) == sorted(bytes(span) for span in left)
    assert siblings.longest == max(map(len, left), default=0)
