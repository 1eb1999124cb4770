"""Places of rows: a slice while pages are in order, else exact indices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.kv.cache import LaneCache
from luceasync.kv.pages import CHUNK_TOKENS, PageEvent, PageMap
from luceasync.kv.state import StateTensor
from luceasync.models.files import read_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import Plan, make_plan

NUM_LANES, NUM_PAGES = 3, 4


@dataclass(frozen=True)
class Kept:
    """The state of a kind of layer."""

    rows: tuple[StateTensor, ...] = ()
    end: tuple[StateTensor, ...] = ()


ROWS = Kept(rows=(StateTensor("k", (2, 8), "kv"), StateTensor("v", (2, 8), "kv")))
END = Kept(
    end=(StateTensor("window", (3, 10), "compute"), StateTensor("state", (2, 4, 6), "float32"))
)
KINDS = (END, ROWS, END)


def make_cache(dtype: torch.dtype = torch.float32) -> LaneCache:
    return LaneCache(
        KINDS,
        num_lanes=NUM_LANES,
        num_pages=NUM_PAGES,
        dtype_of=lambda role: torch.float32 if role == "float32" else dtype,
        device=torch.device("cpu"),
    )


def places_by_hand(pages: list[int], begin: int, end: int) -> list[int]:
    return [pages[t // CHUNK_TOKENS] * CHUNK_TOKENS + t % CHUNK_TOKENS for t in range(begin, end)]


def as_list(places: slice | torch.Tensor) -> list[int]:
    whole = range(NUM_PAGES * CHUNK_TOKENS)
    return list(whole[places]) if isinstance(places, slice) else places.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kind_has_its_tensors_and_recurrent_state_a_lane_for_padding(dtype: torch.dtype):
    (conv, delta), (keys, values), _ = make_cache(dtype).layers
    assert keys.shape == values.shape == (NUM_LANES, NUM_PAGES * 64, 2, 8)
    assert (conv.shape, delta.shape) == ((NUM_LANES + 1, 3, 10), (NUM_LANES + 1, 2, 4, 6))
    assert keys.dtype == values.dtype == conv.dtype == dtype and delta.dtype == torch.float32
    assert not conv.any() and not delta.any()


def test_pages_in_order_are_a_slice():
    cache = make_cache()
    cache.place([PageEvent(0, chunk, chunk) for chunk in range(NUM_PAGES)])
    assert cache.places(0, 0, 256) == slice(0, 256)
    assert cache.places(0, 63, 65) == slice(63, 65)


def test_a_moved_page_ends_the_slice_of_its_lane_there():
    cache = make_cache()
    cache.place([PageEvent(lane, chunk, chunk) for lane in (0, 2) for chunk in range(NUM_PAGES)])
    cache.place([PageEvent(1, chunk, page) for chunk, page in enumerate([0, 1, 3])])
    assert cache.places(1, 0, 128) == slice(0, 128)
    assert cache.places(0, 0, 256) == cache.places(2, 0, 256) == slice(0, 256)
    places = cache.places(1, 120, 140)
    assert places.dtype == torch.int64
    assert places.tolist() == places_by_hand([0, 1, 3], 120, 140)


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(NUM_PAGES)), ends=st.tuples(*[st.integers(0, 256)] * 2))
def test_places_are_those_of_the_map_in_any_order(order: list[int], ends: tuple[int, int]):
    begin, end = sorted(ends)
    cache, pages = make_cache(), PageMap(NUM_LANES, NUM_PAGES, order)
    cache.place(pages.extend(2, end))
    assert as_list(cache.places(2, begin, end)) == places_by_hand(order, begin, end)


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(NUM_PAGES)), ends=st.tuples(*[st.integers(0, 256)] * 2))
def test_runs_are_the_same_places_in_few_ranges(order: list[int], ends: tuple[int, int]):
    begin, end = sorted(ends)
    cache, pages = make_cache(), PageMap(NUM_LANES, NUM_PAGES, order)
    cache.place(pages.extend(2, end))
    runs = [run for run in cache.runs(2, begin, end) if run]
    assert [place for run in runs for place in run] == places_by_hand(order, begin, end)
    assert all(a.stop != b.start for a, b in itertools.pairwise(runs))


def test_a_chunk_that_comes_back_to_its_own_page_is_where_it_should_be():
    cache = make_cache()
    cache.place([PageEvent(0, chunk, chunk) for chunk in range(NUM_PAGES)])
    cache.place([PageEvent(0, 1, 3), PageEvent(0, 1, 1)])
    assert as_list(cache.places(0, 0, 200)) == list(range(200))


def test_events_reach_the_devices_table():
    cache = make_cache()
    identity = list(range(NUM_PAGES))
    assert cache.tables.dtype == torch.int32
    assert cache.tables.tolist() == [identity] * NUM_LANES
    cache.place([PageEvent(1, 0, 2), PageEvent(1, 1, 1), PageEvent(1, 2, 0), PageEvent(2, 0, 0)])
    assert cache.tables.tolist() == [identity, [2, 1, 0, 3], identity]
    assert cache.absent.tolist() == [0] * (NUM_LANES + 1)


def test_the_table_lists_what_is_here_and_ranks_leave_no_gap():
    cache = make_cache()
    cache.place([PageEvent(1, chunk, page) for chunk, page in enumerate([2, 1, 3, 0])])
    cache.place([PageEvent(1, 0, None), PageEvent(1, 2, None), PageEvent(1, 4, 3)])
    assert cache.tables[1, :3].tolist() == [1, 0, 3]  # of chunks 1, 3 and 4
    assert cache.absent.tolist() == [0, 128, 0, 0]
    assert cache.row_index(1, 4 * 64 + 5) == 2 * 64 + 5 and cache.row_index(1, 5 * 64) == 3 * 64
    assert as_list(cache.places(1, 60, 70)) == [*range(124, 128), *range(6)]
    assert cache.runs(1, 3 * 64, 5 * 64) == [range(64), range(192, 256)]
    with pytest.raises(AssertionError, match="not all of"):
        cache.runs(1, 64, 4 * 64)


def test_a_lane_that_is_reset_has_nothing_of_what_it_had():
    cache = make_cache()
    cache.place([PageEvent(1, 0, 0), PageEvent(1, 1, 1), PageEvent(1, 0, None)])
    assert cache.absent.tolist() == [0, 64, 0, 0]
    cache.reset(1)
    assert not cache.absent.any()
    cache.place([PageEvent(1, 0, 2)])
    assert as_list(cache.places(1, 0, 64)) == [*range(128, 192)]


def test_the_table_stays_one_tensor():
    """Captured graphs hold the table's address."""
    cache = make_cache()
    address = cache.tables.data_ptr()
    cache.place([PageEvent(0, 0, 1)])
    assert cache.tables.data_ptr() == address


def test_reset_forgets_the_recurrent_state_of_one_lane_only():
    cache = make_cache()
    for state in (tensor for pair in cache.layers for tensor in pair):
        state.fill_(1.0)
    cache.reset(1)
    for kind, pair in zip(KINDS, cache.layers, strict=True):
        for state in pair:
            zeroed = [not lane.any() for lane in state]
            assert zeroed == [kind == END and lane == 1 for lane in range(len(state))]
            assert all(lane.any() == lane.all() for lane in state)


def test_an_end_that_was_set_aside_is_with_the_padding_until_the_next_pass():
    cache = make_cache()
    assert cache.end_after(1, 100) == 1
    cache.note_end_aside(1, 90, 100)
    assert [cache.end_after(1, 90), cache.end_after(1, 100), cache.end_after(0, 90)] == [-1, 1, 0]
    with pytest.raises(AssertionError, match="95 tokens"):
        cache.end_after(1, 95)
    cache.begin_pass()
    assert cache.end_after(1, 90) == 1


def test_close_lets_the_tensors_go_and_may_be_repeated():
    cache = make_cache()
    cache.close()
    cache.close()
    assert cache.layers == [] and cache.num_bytes == 0


def make_state_plan(model_dir: Path, dtype: str) -> Plan:
    return make_plan(
        read_spec(model_dir),
        [offer_of("cpu:0", 2**33)],
        precision=Precision.of(dtype),
        weights=None,
        parallel=3,
        max_ctx_tokens=100,
        prefill_chunk_tokens=None,
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_its_bytes_are_those_of_the_plan(tiny_dir: Path, dtype: str):
    spec, plan = read_spec(tiny_dir), make_state_plan(tiny_dir, dtype)
    cache = LaneCache(
        spec.mixers,
        num_lanes=plan.parallel,
        num_pages=plan.num_pages,
        dtype_of=plan.precision.torch_dtype,
        device=torch.device("cpu"),
    )
    shard = plan.shards[0]
    assert cache.num_bytes == plan.device_bytes(shard) - shard.weight_bytes > 0


def test_the_page_that_is_not_written_in_full_holds_no_values_of_before():
    """A decode step reads whole pages: NaN of an earlier sequence would get through any weight."""
    cache = make_cache()
    for stack in cache.row_stacks:
        stack.fill_(float("nan"))
    cache.place([PageEvent(1, 0, 3), PageEvent(1, 1, 2), PageEvent(2, 0, 0), PageEvent(2, 1, 1)])
    for stack in cache.row_stacks:
        values = stack[0]
        assert (values[1, 128:192] == 0).all()
        assert values[1, :128].isnan().all() and values[1, 192:].isnan().all()
        assert (values[2, 64:128] == 0).all() and values[2, :64].isnan().all()


def test_the_first_lane_has_its_pages_from_the_start_as_far_as_is_worth_it(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(*a, float("nan"), **k))
    monkeypatch.setattr("luceasync.kv.cache.TOUCHED_BYTES", 100 * 2 * 2 * 8 * 4)  # 100 tokens
    cache, rows = make_cache(), NUM_PAGES * CHUNK_TOKENS
    cache.touch()
    (keys, values) = cache.layers[1]
    for stack in (keys, values):
        assert not stack[0, :100].any()
        assert stack[0, 100:rows].isnan().all() and stack[1:].isnan().all()
