"""The least valuable nodes are evicted first, and states before their nodes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.prefix_tree.eviction import Eviction, value_per_byte, victims
from luceasync.prefix_tree.tree import Tree
from tests.prefix_tree.nodes import BOTH, DISK, MEMORY, grow, make
from tests.reference import prefix as truth

HOUR_S = 3600.0


def test_a_leaf_goes_before_its_parent_and_then_the_parent_may_go():
    first, second = grow(Tree(), [1] * 10, [2] * 10, hits=0)
    second = replace(second, hits=99)
    expected = Eviction((), (second.key, first.key), 200, 0)
    assert evict([first, second], 150) == expected


def evict(nodes, over_bytes: int, now_s: float = 1000.0, *, tier="memory", **fields) -> Eviction:
    return victims(nodes, tier, over_bytes, now_s, **{"recurrent": False, **fields})


def test_no_more_is_evicted_than_necessary():
    nodes = [grow(Tree(), [i] * 10)[0] for i in range(5)]
    assert len(evict(nodes, 101).keys) == 2 and evict(nodes, 0).keys == ()


def test_the_chain_of_a_running_request_stays_and_the_answer_says_what_is_missing():
    chain = grow(Tree(), [1] * 10, [2] * 10, [3] * 10)
    assert evict(chain, 250, protected={chain[1].key}) == Eviction((), (chain[2].key,), 100, 150)


@pytest.mark.parametrize("saved_at_s", [950.0, 1050.0])
def test_what_was_just_saved_stays(saved_at_s):
    node = make(None, [1] * 10, saved_at_s=saved_at_s)
    assert evict([node], 50) == Eviction((), (), 0, 50)


def test_a_clock_that_was_set_back_protects_nothing_forever():
    node = make(None, [1] * 10, saved_at_s=9999.0)
    assert evict([node], 50).keys == (node.key,)


def test_the_chain_is_kept_in_a_tier_that_its_tip_has_not_reached():
    first = make(None, [1] * 10, tiers=BOTH)
    tip = make(first, [2] * 10)
    assert evict([first, tip], 50, tier="disk").keys == (first.key,)
    assert evict([first, tip], 50, tier="disk", protected={tip.key}).keys == ()


def test_a_node_that_memory_alone_holds_is_kept_for_what_continues_it_on_disk():
    first = make(None, [1] * 10)
    second = make(first, [2] * 10, tiers=DISK)
    assert evict([first, second], 50).keys == ()
    assert evict([replace(first, tiers=BOTH), second], 50).keys == (first.key,)


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"last_used_s": 0.0}, {"last_used_s": 6 * HOUR_S}),
        ({"hits": 1}, {"hits": 2}),
        ({"state_tiers": MEMORY}, {}),
        ({"hits": 1, "last_used_s": 12 * HOUR_S}, {"hits": 16, "last_used_s": 0.0}),
    ],
)
def test_what_is_old_rarely_used_or_large_goes_first(worse, better):
    nodes = [make(None, [1] * 10, **worse), make(None, [2] * 10, **better)]
    for order in (nodes, nodes[::-1]):
        assert evict(order, 1, 12 * HOUR_S).keys == (nodes[0].key,)


def test_value_halves_in_a_half_life():
    node = make(None, [1] * 10, last_used_s=100.0)
    now, later = (
        value_per_byte(node, {}, "memory", t, recurrent=False) for t in (100.0, 100.0 + 6 * HOUR_S)
    )
    assert now == 2 * later == 0.1


def test_for_a_recurrent_model_a_leaf_without_a_state_is_worth_nothing():
    bare = make(None, [1] * 1000, hits=99)
    state = make(None, [2] * 10, state_tiers=MEMORY)
    assert evict([bare, state], 1, recurrent=True).keys == (bare.key,)
    assert evict([bare, state], 1, recurrent=False).keys == (state.key,)


def test_a_state_saves_all_tokens_since_the_state_before_it():
    first, second = grow(Tree(), [1] * 30, [2] * 40)
    third = make(second, [3] * 50, state_tiers=MEMORY)
    by_key = {n.key: n for n in (replace(first, state_tiers=MEMORY), second, third)}
    value = value_per_byte(third, by_key, "memory", 0.0, recurrent=True)
    assert value == 90 / third.bytes_in("memory")


def test_a_tier_is_judged_by_the_states_that_it_holds():
    first = make(None, [1] * 30, tiers=BOTH, state_tiers=DISK)
    second = make(first, [2] * 40, tiers=BOTH, state_tiers=MEMORY)
    by_key = {n.key: n for n in (first, second)}
    value = value_per_byte(second, by_key, "memory", 0.0, recurrent=True)
    assert value == 70 / second.bytes_in("memory")
    assert value_per_byte(first, by_key, "memory", 0.0, recurrent=True) == 0


@st.composite
def forests(draw) -> list:
    tree = Tree()
    for i, (index, tiers) in enumerate(
        draw(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([MEMORY, DISK, BOTH]))))
    ):
        parents = [None, *tree]
        fields = {
            "state_tiers": tiers if draw(st.booleans()) else frozenset(),
            "hits": draw(st.integers(0, 3)),
            "last_used_s": draw(st.floats(0, 1e5)),
            "saved_at_s": draw(st.sampled_from([0.0, 99_990.0])),
        }
        tree.insert(make(parents[index % len(parents)], [i] * (i % 5 + 1), tiers=tiers, **fields))
    return list(tree)


@pytest.mark.slow
@settings(deadline=None)
@given(
    forests(), st.integers(0, 2000), st.booleans(), st.sampled_from(["memory", "disk"]), st.data()
)
def test_victims_are_those_of_a_full_search_each_time(nodes, over_bytes, recurrent, tier, data):
    protected = {node.key for node in nodes if data.draw(st.integers(0, 4)) == 0}
    asked = {"recurrent": recurrent, "protected": protected, "min_age_s": 60.0}
    found = victims(nodes, tier, over_bytes, 1e5, **asked)
    assert list(found.keys) == truth.evict(nodes, tier, over_bytes, 1e5, **asked)
    freed = sum(node.bytes_in(tier) for node in nodes if node.key in found.keys)
    assert found.freed_bytes == freed
    assert found.missing_bytes == max(0, over_bytes - freed)


@pytest.mark.slow
@settings(deadline=None)
@given(forests(), st.integers(0, 2000), st.sampled_from(["memory", "disk"]))
def test_what_stays_can_still_be_reached(nodes, over_bytes, tier):
    tree = Tree()
    for node in nodes:
        tree.insert(node)
    for key in victims(nodes, tier, over_bytes, 1e9, recurrent=False).keys:
        gone = tree.remove(key, tier)
        assert [node.key for node in gone] in ([], [key])


# --- states by themselves -------------------------------------------------------------------------


def with_states(num_nodes: int, tree: Tree | None = None, first: int = 0, **fields) -> list:
    """A chain of nodes of 100 tokens, each with a state."""
    spans = [[first + i] * 100 for i in range(num_nodes)]
    return grow(tree or Tree(), *spans, state_tiers=MEMORY, **fields)


def evict_states(nodes, over_bytes: int, ends=frozenset(), **fields) -> Eviction:
    return evict(nodes, over_bytes, recurrent=True, protected_ends=ends, **fields)


def test_states_on_the_way_to_one_node_go_before_any_node():
    chain = with_states(4)
    size = chain[0].state_bytes
    gone = evict_states(chain, 3 * size)
    assert set(gone.ends) == {n.key for n in chain[:3]} and gone.keys == ()
    assert gone.freed_bytes == 3 * size


def test_also_where_all_of_the_path_is_in_use_and_the_tips_last():
    chain = with_states(4)
    size = chain[0].state_bytes
    gone = evict_states(chain, 4 * size, protected={chain[3].key})
    assert gone.ends[-1] == chain[3].key and len(gone.ends) == 4 and gone.missing_bytes == 0


def test_but_no_state_that_is_about_to_be_restored():
    chain = with_states(4)
    size = chain[0].state_bytes
    gone = evict_states(chain, 4 * size, {chain[1].key}, protected={chain[3].key})
    assert chain[1].key not in gone.ends and gone.missing_bytes == size


def test_of_these_the_least_recently_used_goes_first_then_what_saves_least():
    old, new = with_states(3, last_used_s=1.0), with_states(3, first=50, last_used_s=2.0)
    short = make(new[-1], [7] * 10, state_tiers=MEMORY, last_used_s=2.0)
    tip = make(short, [8] * 100, state_tiers=MEMORY, last_used_s=2.0)
    gone = evict_states([*old, *new, short, tip], 3 * old[0].state_bytes)
    assert set(gone.ends[:2]) == {n.key for n in old[:2]}
    assert gone.ends[2] == short.key


def test_where_branches_part_the_state_stays_until_one_is_gone():
    tree = Tree()
    [root] = with_states(1, tree)
    branches = [make(root, [i] * 100, state_tiers=MEMORY, last_used_s=float(i)) for i in (1, 2)]
    nodes, size = [root, *branches], branches[0].bytes_in("memory")
    assert evict_states(nodes, 1).keys == (branches[0].key,)
    both = evict_states(nodes, size + 1)
    assert both.keys == (branches[0].key,) and both.ends == (root.key,)


def test_a_leaf_of_a_few_tokens_goes_as_early_as_a_state():
    tree = Tree()
    [root] = with_states(1, tree, last_used_s=5.0)
    opening = make(root, [1] * 7, state_tiers=MEMORY, hits=99, last_used_s=4.0)
    others = [make(root, [i] * 100, state_tiers=MEMORY, last_used_s=1.0) for i in (2, 3)]
    assert evict_states([root, opening, *others], 1).keys == (opening.key,)


def test_a_file_that_holds_rows_and_end_goes_as_a_whole():
    sizes = {"file_bytes": 1100, "end_file_bytes": 0}
    chain = [replace(n, **sizes) for n in on_disk(with_states(4))]
    found = evict_states(chain, 1, tier="disk")
    assert (found.ends, found.keys, found.freed_bytes) == ((), (chain[-1].key,), 1100)


def on_disk(nodes: list) -> list:
    return [replace(node, tiers=DISK, state_tiers=DISK) for node in nodes]


def test_of_files_those_of_inner_states_go_before_any_rows():
    chain = on_disk(with_states(4))
    gone = evict_states(chain, 2 * chain[0].state_bytes, tier="disk")
    assert set(gone.ends) == {n.key for n in chain[:2]} and gone.keys == ()


def test_on_disk_the_state_where_the_last_answer_is_opened_is_worth_what_a_tip_is():
    """Of an old conversation the tip goes before it, though the tip is a leaf."""
    old = on_disk(with_states(1, last_used_s=1.0))
    new = on_disk(with_states(2, first=50, last_used_s=9e4))
    gone = evict_states([*old, *new], 1, tier="disk", now_s=1e5)
    assert (gone.ends, gone.keys) == ((), (old[0].key,))


def test_a_state_that_was_just_saved_stays_as_a_node_does():
    chain = with_states(3, saved_at_s=950.0)
    assert evict_states(chain, 1) == Eviction((), (), 0, 1)
    assert evict_states(chain, 1, min_age_s=0.0).ends


@pytest.mark.slow
@settings(deadline=None)
@given(forests(), st.integers(0, 3000), st.data())
def test_nothing_is_missing_while_a_state_could_go(nodes, over_bytes, data):
    protected = {node.key for node in nodes if data.draw(st.booleans())}
    ends = {node.key for node in nodes if data.draw(st.integers(0, 4)) == 0}
    found = victims(
        nodes, "memory", over_bytes, 1e5, recurrent=True, protected=protected, protected_ends=ends,
        min_age_s=0.0,
    )  # fmt: skip
    assert not ends & set(found.ends)
    left = [
        n
        for n in nodes
        if "memory" in n.state_tiers and n.key not in {*found.ends, *found.keys, *ends}
    ]
    if found.missing_bytes:
        assert not left
    freed = 0
    for node in nodes:
        if node.key in found.keys:
            freed += node.bytes_in("memory")
        elif node.key in found.ends:
            freed += node.state_bytes
    assert found.freed_bytes == freed


@pytest.mark.parametrize("protected_ends", [None, frozenset()])
def test_claimed_ends_go_last_but_they_go(protected_ends):
    tree, fields = Tree(), {"state_tiers": MEMORY, "hits": 0}
    talk = grow(tree, [1] * 100, [2] * 2, **fields)
    titles = [grow(tree, [i] * 300, **{**fields, "hits": 9})[0] for i in range(3, 6)]
    claimed = {talk[-1].key}
    how = {"recurrent": True, "protected_ends": protected_ends}
    assert talk[-1].key in evict([*talk, *titles], 9000, **how).keys
    gone = evict([*talk, *titles], 9000, claimed=claimed, **how)
    assert set(gone.keys) == {title.key for title in titles} and not gone.missing_bytes
    everything = evict([*talk, *titles], 99999, claimed=claimed, **how)
    assert everything.keys[-2:] == (talk[1].key, talk[0].key)
    assert talk[1].key not in gone.ends


def test_states_on_the_way_to_a_claimed_end_go_as_usual():
    chain = grow(Tree(), [1] * 100, [2] * 100, [3] * 100, state_tiers=MEMORY)
    how = {"recurrent": True, "protected_ends": frozenset()}
    gone = evict(chain, 200, claimed={chain[2].key}, **how)
    assert gone.keys == () and gone.ends == (chain[0].key, chain[1].key)
    gone = evict(chain, 150, claimed={chain[0].key, chain[2].key}, **how)
    assert gone.ends[0] == chain[1].key
