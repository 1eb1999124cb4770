"""Cuts change no run, states thin out, and claims are bounded."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.prefix_tree.policy import PrefillCut, granted, plan_cuts, thin_states, with_ancestors
from luceasync.prefix_tree.tree import Tree
from tests.prefix_tree.nodes import MEMORY, grow


def cuts(begin: int, num_tokens: int, boundaries: list[int], stops=range(10**6), **fields):
    fields = {"interval_tokens": 2048, **fields}
    return plan_cuts(begin, num_tokens, boundaries, stops=stops, **fields)


def test_attention_is_cut_at_turn_ends_every_interval_and_at_the_end():
    expected = [
        PrefillCut(1000, True),
        PrefillCut(3048, False),
        PrefillCut(5096, False),
        PrefillCut(5500, True),
    ]
    assert cuts(0, 6000, [1000, 5500]) == [*expected, PrefillCut(6000, False)]


def test_recurrent_is_cut_at_the_chunk_end_before_a_turn_end():
    ends = cuts(0, 1000, [600, 990], stops=range(256, 1000, 256))
    assert ends == [PrefillCut(512, True), PrefillCut(768, True), PrefillCut(1000, False)]


def test_a_turn_that_ends_with_the_run_is_cut_there():
    assert cuts(0, 300, [300], stops=[256]) == [PrefillCut(300, True)]


def test_turns_within_one_chunk_give_one_cut():
    ends = cuts(0, 900, [270, 280, 290], stops=range(256, 900, 256))
    assert ends == [PrefillCut(256, True), PrefillCut(900, False)]


def test_a_turn_that_ends_before_the_first_stop_is_not_cut():
    assert cuts(256, 900, [300], stops=range(512, 900, 512)) == [PrefillCut(900, False)]


def test_chunks_longer_than_the_interval_are_cut_at_each_chunk_end():
    ends = cuts(0, 5000, [], stops=[2048, 4096], interval_tokens=1024)
    assert [cut.end for cut in ends] == [2048, 4096, 5000]


def test_of_two_cuts_too_near_the_later_is_made():
    ends = [cut.end for cut in cuts(0, 3000, [20, 2060, 2990], min_tokens=64)]
    assert ends == [2060, 3000]


def test_a_firm_cut_is_made_however_near_others_are():
    ends = [cut.end for cut in cuts(0, 3000, [2850, 2900, 2990], min_tokens=128, firm=2990)]
    assert ends == [2048, 2850, 2990, 3000]  # 2850: for want of the firm one it would be made
    assert cuts(2980, 3000, [2990], min_tokens=16, firm=2990)[0] == PrefillCut(2990, True)


def test_nothing_run_nothing_cut():
    assert cuts(7, 7, [7]) == []


@given(st.data(), st.integers(0, 300), st.integers(1, 300), st.integers(1, 40), st.integers(1, 20))
def test_cuts_lie_at_stops_in_order_and_end_the_run(data, begin, length, interval, min_tokens):
    num_tokens = begin + length
    boundaries = data.draw(st.lists(st.integers(0, 700), max_size=8))
    stops = sorted(data.draw(st.sets(st.integers(1, 700), max_size=30)))
    made = cuts(
        begin, num_tokens, boundaries, stops, interval_tokens=interval, min_tokens=min_tokens
    )
    ends = [begin, *[cut.end for cut in made]]
    assert ends[-1] == num_tokens and set(ends[1:-1]) <= set(stops)
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    assert all(n >= min_tokens for n in lengths) or len(lengths) == 1


@given(st.integers(0, 3000), st.integers(1, 9000), st.integers(1, 4000), st.integers(1, 8))
def test_no_node_is_longer_than_the_interval_where_stops_allow(begin, length, interval, chunks):
    chunk = 64 * chunks
    stops = range(chunk, begin + length, chunk)
    ends = [
        begin,
        *[c.end for c in cuts(begin, begin + length, [], stops, interval_tokens=interval)],
    ]
    assert all(b - a <= max(interval, chunk) for a, b in itertools.pairwise(ends))


def path_of(num_nodes: int, turn_ends: set[int] = frozenset()) -> list:
    fields = {"state_tiers": MEMORY}
    chain = grow(Tree(), *[[i] for i in range(num_nodes)], **fields)
    return [replace(node, is_turn_end=i in turn_ends) for i, node in enumerate(chain, 1)]


def thinned(path: list) -> list:
    gone = set(thin_states(path))
    return [replace(n, state_tiers=frozenset()) if n.key in gone else n for n in path]


def states(path: list) -> set[int]:
    return {i for i, node in enumerate(path, 1) if node.has_state}


@pytest.mark.slow
@given(st.integers(1, 300), st.sets(st.integers(1, 300), max_size=20))
def test_turn_ends_the_newest_and_a_logarithm_of_the_rest_keep_their_state(num_nodes, turn_ends):
    kept = states(thinned(path_of(num_nodes, turn_ends)))
    assert num_nodes in kept and {t for t in turn_ends if t <= num_nodes} <= kept
    assert len(kept - turn_ends) <= num_nodes.bit_length() + 1


@pytest.mark.slow
@given(st.integers(1, 300), st.data())
def test_a_prompt_that_parts_near_the_tip_runs_little_again(num_nodes, data):
    kept = states(thinned(path_of(num_nodes)))
    place = data.draw(st.integers(1, num_nodes))
    before = max((i for i in kept if i <= place), default=0)
    assert place - before < 2 * (num_nodes - place + 1)


def test_turns_behind_a_long_beginning_take_no_state_from_it():
    beginning = path_of(6)
    turns = path_of(30, set(range(7, 31)))
    assert states(thinned(turns)) - set(range(7, 31)) == states(thinned(beginning)) == {4, 5, 6}


@given(st.integers(1, 100), st.sets(st.integers(1, 100)))
def test_thinning_while_a_path_grows_ends_where_thinning_once_does(num_nodes, when):
    whole = path_of(num_nodes)
    path = []
    for i, node in enumerate(whole, 1):
        path.append(node)
        path = thinned(path) if i in when else path
    assert states(thinned(path)) == states(thinned(whole))


def test_the_newest_state_stays_where_the_tip_has_none():
    path = path_of(9)
    path = [*path[:5], *[replace(n, state_tiers=frozenset()) for n in path[5:]]]
    assert path[4].key not in thin_states(path)


def test_states_to_keep_stay():
    path = path_of(9)
    (gone, *_) = thin_states(path)
    assert gone not in thin_states(path, keep={gone})


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
