"""Nodes of one shard: the bits of the lane, in regions of their own, into any lane."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.arena import HostMemory, PlainMemory
from luceasync.host_cache.copies import DirectCopies
from luceasync.host_cache.nodes import NodeStore, Span, check_tensors
from luceasync.host_cache.shard_nodes import ShardContents, ShardNode
from luceasync.kv.cache import LaneCache
from luceasync.kv.pages import PageMap
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.delta import DeltaSpec

NUM_LANES, NUM_PAGES = 3, 4
ROWS, END = AttentionSpec(1, 1, 3, 2, 1e4, gated=False), DeltaSpec(1, 1, 3, 5, 4)
HYBRID, ATTENTION = (END, ROWS, END, ROWS), (ROWS, ROWS)


class NotedMemory:
    """Plain memory that keeps count, and has no room after `num_regions`."""

    def __init__(self, num_regions: int = 99) -> None:
        self.sizes: list[int] = []
        self._num_regions = num_regions

    def allocate(self, num_bytes: int) -> memoryview:
        if len(self.sizes) == self._num_regions:
            raise MemoryError("no room")
        self.sizes.append(num_bytes)
        return PlainMemory().allocate(num_bytes)

    def close(self) -> None:
        """Nothing is held."""


def make_cache(kinds=HYBRID, dtype: torch.dtype = torch.bfloat16, order=None) -> LaneCache:
    """A cache whose lanes have all their pages and hold noise."""
    cache = LaneCache(
        kinds,
        first_layer=5,
        num_lanes=NUM_LANES,
        num_pages=NUM_PAGES,
        dtype_of=lambda role: torch.float32 if role == "float32" else dtype,
        device=torch.device("cpu"),
    )
    pages = PageMap(NUM_LANES, NUM_PAGES, order)
    for lane in range(NUM_LANES):
        cache.place(pages.extend(lane, NUM_PAGES * 64))
    for stack in (stack for pair in cache.stacked.values() for stack in pair):
        stack.copy_(torch.randn(stack.shape))
    return cache


def make_store(cache: LaneCache, memory: HostMemory | None = None) -> NodeStore[ShardNode]:
    return NodeStore(ShardContents(cache, 2, memory or PlainMemory(), DirectCopies(cache)))


def lane_tensors(cache: LaneCache, lane: int, begin: int, end: int) -> dict[str, Tensor]:
    """What the lane holds of tokens [begin, end), by name, read token by token."""
    found = {}
    kinds = HYBRID if len(cache.layers) == len(HYBRID) else ATTENTION
    for layer, (kind, state) in enumerate(zip(kinds, cache.layers, strict=True), 5):
        for declared, tensor in zip((*kind.rows, *kind.end), state, strict=True):
            places = [int(cache.tables[lane, t // 64]) * 64 + t % 64 for t in range(begin, end)]
            whole = tensor[lane]
            kept = whole[places] if declared in kind.rows else whole
            found[f"ls2_{declared.name}.{layer}"] = kept.clone()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@settings(max_examples=40, deadline=None)
@given(
    order=st.permutations(range(NUM_PAGES)),
    ends=st.tuples(*[st.integers(0, 256)] * 2).filter(lambda ends: ends[0] != ends[1]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_node_is_what_the_lane_holds(order, ends, dtype):
    begin, end = sorted(ends)
    cache = make_cache(dtype=dtype, order=order)
    store = make_store(cache)
    assert store.save(1, "n", Span(begin, end, True)).is_done
    assert_same(store.export("n"), lane_tensors(cache, 1, begin, end))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.permutations(range(NUM_PAGES)), st.sets(st.integers(1, 256), min_size=1, max_size=4))
def test_a_chain_is_restored_into_a_lane_and_touches_no_other(order, cuts):
    cache = make_cache(order=order)
    store, ends = make_store(cache), sorted(cuts)
    expected = lane_tensors(cache, 0, 0, ends[-1])
    others = lane_tensors(cache, 1, 0, 256)
    for begin, end in zip([0, *ends], ends, strict=False):
        store.save(0, str(end), Span(begin, end, end == ends[-1]))
    cache.reset(2)
    cache.place(PageMap(NUM_LANES, NUM_PAGES, order).extend(2, ends[-1]))
    assert store.restore(2, [str(end) for end in ends], ends[-1]).is_done
    assert_same(lane_tensors(cache, 2, 0, ends[-1]), expected)
    assert_same(lane_tensors(cache, 1, 0, 256), others)


@given(st.integers(1, 200))
@settings(max_examples=20, deadline=None)
def test_pure_attention_may_use_a_part_of_the_last_node(num_tokens: int):
    cache = make_cache(ATTENTION, order=[2, 0, 3, 1])
    store = make_store(cache)
    store.save(0, "n", Span(0, 200, False))
    before, rest = lane_tensors(cache, 0, 0, num_tokens), lane_tensors(cache, 2, num_tokens, 256)
    store.restore(2, ["n"], num_tokens)
    assert_same(lane_tensors(cache, 2, 0, num_tokens), before)
    assert_same(lane_tensors(cache, 2, num_tokens, 256), rest)


@pytest.mark.parametrize(
    ("nodes", "num_tokens", "words"),
    [
        (["b"], 90, "expected a chain"),
        (["a", "c"], 120, "expected a chain"),
        (["a"], 61, "do not end in"),
        (["a", "b"], 60, "do not end in"),
        (["a", "b"], 80, "no state at 80"),
        (["a"], 60, "no state at 60"),
    ],
)
def test_a_chain_that_gives_no_whole_lane_is_our_own_bug(nodes, num_tokens: int, words: str):
    store = make_store(make_cache())
    for node, span in {"a": (0, 60, False), "b": (60, 90, True), "c": (90, 120, True)}.items():
        store.save(0, node, Span(*span))
    with pytest.raises(AssertionError, match=words):
        store.restore(1, nodes, num_tokens)


def test_the_state_can_be_dropped_alone():
    cache = make_cache()
    store = make_store(cache)
    store.save(0, "n", Span(0, 70, True))
    rows = {name: t for name, t in store.export("n").items() if "_attn_" in name}
    store.drop("n", state_only=True)
    assert {name: t.data_ptr() for name, t in store.export("n").items()} == {
        name: t.data_ptr() for name, t in rows.items()
    }


@pytest.mark.parametrize("with_state", [True, False])
def test_a_save_takes_the_bytes_that_were_announced(with_state: bool):
    memory, span = NotedMemory(), Span(3, 70, with_state)
    store = make_store(make_cache(), memory)
    store.save(0, "n", span)
    assert store.sizes.of(span) == (67 * 2 * 2 * 3 * 2, 2 * (15 * 4 + 3 * 11 * 2) * with_state)
    assert memory.sizes == [size for size in store.sizes.of(span) if size]


@pytest.mark.parametrize("num_regions", [0, 1])
def test_without_room_nothing_is_saved(num_regions: int):
    store = make_store(make_cache(), NotedMemory(num_regions))
    with pytest.raises(MemoryError):
        store.save(0, "n", Span(0, 70, True))
    with pytest.raises(KeyError):
        store.export("n")


def test_a_node_that_comes_back_with_its_state_replaces_the_one_without():
    cache = make_cache()
    source, store = make_store(cache), make_store(cache)
    source.save(0, "n", Span(0, 70, True))
    given = source.export("n")
    store.save(0, "n", Span(0, 70, False))
    check_tensors(store.shapes(Span(0, 70, True)), given)
    store.adopt("n", Span(0, 70, True), given)
    assert {t.data_ptr() for t in store.export("n").values()} == {
        t.data_ptr() for t in given.values()
    }


def test_tensors_that_are_not_contiguous_are_refused():
    cache = make_cache()
    store = make_store(cache)
    store.save(0, "n", Span(0, 70, True))
    given = store.export("n")
    name = "ls2_delta.5"
    given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(SnapshotMismatch, match=f"{name}: expected contiguous"):
        check_tensors(store.shapes(Span(0, 70, True)), given)
