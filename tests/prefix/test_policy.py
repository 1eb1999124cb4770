"""Cuts change no run, states thin out, and what is worth least goes first."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.prefix.policy import Cut, Eviction, plan_cuts, thin_states, value_per_byte, victims
from luceasync.prefix.tree import Tree
from tests.prefix.nodes import BOTH, DISK, MEMORY, grow, make
from tests.reference import prefix as truth

HOUR_S = 3600.0


def cuts(begin: int, num_tokens: int, boundaries: list[int], stops=range(10**6), **fields):
    fields = {"interval_tokens": 2048, **fields}
    return plan_cuts(begin, num_tokens, boundaries, stops=stops, **fields)


def test_attention_is_cut_at_turn_ends_every_interval_and_at_the_end():
    expected = [Cut(1000, True), Cut(3048, False), Cut(5096, False), Cut(5500, True)]
    assert cuts(0, 6000, [1000, 5500]) == [*expected, Cut(6000, False)]


def test_recurrent_is_cut_at_the_chunk_end_before_a_turn_end():
    ends = cuts(0, 1000, [600, 990], stops=range(256, 1000, 256))
    assert ends == [Cut(512, True), Cut(768, True), Cut(1000, False)]


def test_a_turn_that_ends_with_the_run_is_cut_there():
    assert cuts(0, 300, [300], stops=[256]) == [Cut(300, True)]


def test_turns_within_one_chunk_give_one_cut():
    ends = cuts(0, 900, [270, 280, 290], stops=range(256, 900, 256))
    assert ends == [Cut(256, True), Cut(900, False)]


def test_a_turn_that_ends_before_the_first_stop_is_not_cut():
    assert cuts(256, 900, [300], stops=range(512, 900, 512)) == [Cut(900, False)]


def test_chunks_longer_than_the_interval_are_cut_at_each_chunk_end():
    ends = cuts(0, 5000, [], stops=[2048, 4096], interval_tokens=1024)
    assert [cut.end for cut in ends] == [2048, 4096, 5000]


def test_of_two_cuts_too_near_the_later_is_made():
    ends = [cut.end for cut in cuts(0, 3000, [20, 2060, 2990], min_tokens=64)]
    assert ends == [2060, 3000]


def test_a_firm_cut_is_made_however_near_others_are():
    ends = [cut.end for cut in cuts(0, 3000, [2850, 2900, 2990], min_tokens=128, firm=2990)]
    assert ends == [2048, 2850, 2990, 3000]  # 2850: for want of the firm one it would be made
    assert cuts(2980, 3000, [2990], min_tokens=16, firm=2990)[0] == Cut(2990, True)


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


@given(st.integers(1, 300), st.sets(st.integers(1, 300), max_size=20))
def test_turn_ends_the_newest_and_a_logarithm_of_the_rest_keep_their_state(num_nodes, turn_ends):
    kept = states(thinned(path_of(num_nodes, turn_ends)))
    assert num_nodes in kept and {t for t in turn_ends if t <= num_nodes} <= kept
    assert len(kept - turn_ends) <= num_nodes.bit_length() + 1


@given(st.integers(1, 300), st.data())
def test_who_parts_near_the_tip_runs_little_again(num_nodes, data):
    kept = states(thinned(path_of(num_nodes)))
    place = data.draw(st.integers(1, num_nodes))
    before = max((i for i in kept if i <= place), default=0)
    assert place - before < 2 * (num_nodes - place + 1)


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


def test_keys_to_keep_are_kept():
    path = path_of(9)
    (gone, *_) = thin_states(path)
    assert gone not in thin_states(path, keep={gone})


def test_a_leaf_goes_before_its_parent_and_then_the_parent_may_go():
    first, second = grow(Tree(), [1] * 10, [2] * 10, hits=0)
    second = replace(second, hits=99)
    expected = Eviction((second.key, first.key), 200, 0)
    assert evict([first, second], 150) == expected


def evict(nodes, over_bytes: int, now_s: float = 1000.0, *, tier="memory", **fields) -> Eviction:
    return victims(nodes, tier, over_bytes, now_s, **{"recurrent": False, **fields})


def test_no_more_goes_than_must():
    nodes = [grow(Tree(), [i] * 10)[0] for i in range(5)]
    assert len(evict(nodes, 101).keys) == 2 and evict(nodes, 0).keys == ()


def test_the_chain_of_a_running_request_stays_and_the_answer_says_what_is_missing():
    chain = grow(Tree(), [1] * 10, [2] * 10, [3] * 10)
    assert evict(chain, 250, protected={chain[1].key}) == Eviction((chain[2].key,), 100, 150)


@pytest.mark.parametrize("saved_at_s", [950.0, 1050.0])
def test_what_was_just_saved_stays(saved_at_s):
    node = make(None, [1] * 10, saved_at_s=saved_at_s)
    assert evict([node], 50) == Eviction((), 0, 50)


def test_a_clock_that_was_set_back_protects_nothing_for_ever():
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


@settings(deadline=None)
@given(
    forests(), st.integers(0, 2000), st.booleans(), st.sampled_from(["memory", "disk"]), st.data()
)
def test_victims_are_those_that_a_look_at_all_nodes_each_time_finds(
    nodes, over_bytes, recurrent, tier, data
):
    protected = {node.key for node in nodes if data.draw(st.integers(0, 4)) == 0}
    asked = {"recurrent": recurrent, "protected": protected, "min_age_s": 60.0}
    found = victims(nodes, tier, over_bytes, 1e5, **asked)
    assert list(found.keys) == truth.evict(nodes, tier, over_bytes, 1e5, **asked)
    freed = sum(node.bytes_in(tier) for node in nodes if node.key in found.keys)
    assert found.freed_bytes == freed
    assert found.missing_bytes == max(0, over_bytes - freed)


@settings(deadline=None)
@given(forests(), st.integers(0, 2000), st.sampled_from(["memory", "disk"]))
def test_what_stays_can_still_be_reached(nodes, over_bytes, tier):
    tree = Tree()
    for node in nodes:
        tree.insert(node)
    for key in victims(nodes, tier, over_bytes, 1e9, recurrent=False).keys:
        gone = tree.remove(key, tier)
        assert [node.key for node in gone] in ([], [key])
