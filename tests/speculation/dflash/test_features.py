"""The ring holds the last rows of every lane, and says so when it is asked for others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.platform import open_platform
from luceasync.speculation.dflash.features import (
    FeatureRing,
    FeatureSpec,
    LaneSpans,
    check_rows,
    check_taps,
    torch_scatter,
)
from tests.reference import feature_ring
from tests.reference.feature_ring import Lane

SPEC = FeatureSpec(taps=(1, 4), hidden_size=3)


def make_ring(capacity_tokens: int = 5, dtype: torch.dtype = torch.float32, **more) -> FeatureRing:
    sizes = {"num_lanes": 3, "capacity_tokens": capacity_tokens, "dtype": dtype}
    return FeatureRing(SPEC, **sizes, **({"platform": CpuPlatform()} | more))


def tap_rows(num_entries: int, num_rows: int) -> list[torch.Tensor]:
    return [torch.randn(num_entries, num_rows, 3) for _ in SPEC.taps]


def append(ring: FeatureRing, taps, lanes, begins, paths) -> None:
    """Write the rows of `paths`, and take note of it."""
    num_rows = max(map(len, paths))
    filled_up = [[*path, *[0] * (num_rows - len(path))] for path in paths]
    counts = [len(path) for path in paths]
    lanes_, counts_, paths_ = (
        torch.tensor(x, dtype=torch.int32, device=ring.device) for x in (lanes, counts, filled_up)
    )
    begins_ = torch.tensor(begins, device=ring.device)
    ring.scatter([tap.to(ring.device) for tap in taps], lanes_, begins_, counts_, paths_)
    for lane, begin, count in zip(lanes, begins, counts, strict=True):
        if lane >= 0:
            ring.advance(lane, begin, count)


def filled(num_rows: int, **options) -> tuple[FeatureRing, torch.Tensor]:
    """A ring whose lane 1 was given positions [0, num_rows), and those rows."""
    ring, taps = make_ring(**options), tap_rows(1, num_rows)
    append(ring, taps, [1], [0], [range(num_rows)])
    return ring, torch.cat(taps, dim=-1)[0]


appends = st.lists(
    st.tuples(
        st.permutations([0, 1, 2, -1]).map(lambda lanes: lanes[:2]),
        st.sampled_from([0, 0, 0, 2, -1]),  # how far from the lane's end
        st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=2, max_size=2),
    ),
    max_size=6,
)


@pytest.mark.slow
@given(st.integers(1, 6), appends)
@settings(max_examples=100, deadline=None)
def test_the_last_rows_since_the_last_jump_are_held(capacity, steps) -> None:
    ring, truth = make_ring(capacity), [Lane(capacity) for _ in range(3)]
    for lanes, jump, paths in steps:
        taps = tap_rows(2, 7)
        begins = [max(truth[lane].end + jump, 0) if lane >= 0 else -5 for lane in lanes]
        append(ring, taps, lanes, begins, paths)
        for entry, lane in enumerate(lanes):
            rows = [torch.cat([tap[entry, row] for tap in taps]) for row in paths[entry]]
            if lane >= 0:
                truth[lane].append(begins[entry], rows)
    for lane, expected in enumerate(truth):
        held = ring.valid(lane)
        assert (list(held), held.stop) == (sorted(expected.rows), expected.end)
        found = ring.rows(lane, held.start, held.stop)
        assert all(torch.equal(found[p - held.start], expected.rows[p]) for p in held)


@given(st.integers(1, 12), st.integers(1, 7), st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_held_is_restored_in_a_ring_of_any_capacity(num_rows, capacity, data) -> None:
    ring, rows = filled(num_rows)
    held = ring.valid(1)
    begin = data.draw(st.integers(held.start, held.stop))
    other = make_ring(capacity)
    other.restore(2, begin, ring.rows(1, begin, held.stop))
    again = other.valid(2)
    assert again == range(max(begin, held.stop - capacity), held.stop)
    assert torch.equal(other.rows(2, again.start, again.stop), rows[again.start : again.stop])


def test_spans_of_nodes_are_restored_one_after_the_other() -> None:
    ring, rows = filled(4)
    other = make_ring()
    for begin, end in [(0, 2), (2, 4)]:
        other.restore(0, begin, ring.rows(1, begin, end))
    assert other.valid(0) == range(4)
    assert torch.equal(other.rows(0, 0, 4), rows)


def test_a_reset_lane_holds_nothing_and_leaves_the_others() -> None:
    ring, _ = filled(3)
    append(ring, tap_rows(1, 2), [0], [0], [range(2)])
    ring.reset(1)
    assert [list(ring.valid(lane)) for lane in range(3)] == [[0, 1], [], []]


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(0, 7, range(2, 7)), (4, 6, range(4, 6)), (0, 2, range(2, 2)), (6, 8, range(8, 8))],
)
def test_a_node_carries_what_is_held_up_to_its_end(begin, end, expected) -> None:
    ring, _ = filled(7)
    assert ring.held(1, begin, end) == expected


def test_rows_come_in_the_dtype_of_the_ring() -> None:
    ring, rows = filled(3, dtype=torch.bfloat16)
    assert torch.equal(ring.rows(1, 0, 3), rows.bfloat16())


def _taps(*shape: int, count: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lanes": torch.zeros(1)}, "lanes: torch.float32"),
        ({"counts": torch.zeros(2, dtype=torch.int32)}, r"counts: torch.int32 \(2,\)"),
        ({"paths": torch.zeros(4, dtype=torch.int32)}, r"paths: torch.int32 \(4,\)"),
        ({"taps": [tap.mT for tap in _taps(1, 3, 4)]}, "tap 0 lies on cpu with strides"),
    ],
)
def test_a_scatter_that_cannot_be_is_refused(change, words) -> None:
    index = torch.zeros(1, dtype=torch.int32)
    arguments = {"lanes": index, "begins": index.long(), "counts": index, "paths": index[:, None]}
    with pytest.raises(ValueError, match=words):
        make_ring().scatter(**({"taps": _taps(1, 4, 3)} | arguments | change))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda ring: ring.rows(1, 1, 7), r"\[1, 7\) of lane 1: \[2, 7\) are held"),
        (lambda ring: ring.rows(1, 5, 8), r"\[5, 8\) of lane 1"),
        (lambda ring: ring.rows(0, 0, 1), r"\[0, 0\) are held"),
        (lambda ring: ring.valid(-1), "lane -1"),
        (lambda ring: ring.reset(3), "lane 3"),
        (lambda ring: ring.advance(0, 2, -1), "-1 rows from position 2"),
        (lambda ring: ring.restore(0, -2, torch.zeros(1, 6)), "1 rows from position -2"),
        (lambda ring: ring.restore(0, 0, torch.zeros(1, 5)), r"rows \(1, 5\): \[tokens, 6\]"),
        (lambda ring: ring.restore(0, 0, torch.zeros(1, 6).long()), "rows: torch.int64"),
    ],
)
def test_what_is_not_held_or_cannot_be_is_an_error(call, words) -> None:
    ring, _ = filled(7)
    with pytest.raises(ValueError, match=words):
        call(ring)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FeatureSpec((), 4), r"taps \[\]"),
        (lambda: FeatureSpec((3, -1), 4), r"taps \[3, -1\]"),
        (lambda: FeatureSpec((3, 3), 4), r"taps \[3, 3\]"),
        (lambda: FeatureSpec((1,), 0), "hidden size 0"),
        (lambda: make_ring(0), "3 lanes of 0 features"),
        (lambda: make_ring(dtype=torch.float64), "the ring: torch.float64"),
    ],
)
def test_a_ring_that_cannot_be_is_refused(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.gpu
def test_taps_of_the_host_come_to_a_ring_on_a_gpu_and_back() -> None:
    ring, rows = filled(9, platform=open_platform("cuda:0"), dtype=torch.bfloat16)
    assert torch.equal(ring.rows(1, 4, 9).cpu(), rows[4:9].bfloat16())
    other = make_ring(platform=open_platform("cuda:0"), dtype=torch.float32)
    other.restore(0, 4, ring.rows(1, 4, 9).cpu())
    assert torch.equal(other.rows(0, 4, 9).cpu(), rows[4:9].bfloat16().float())


@pytest.mark.parametrize(
    ("taps", "words"),
    [
        (_taps(1, 4, 3, count=1), r"1 taps came; layers \[1, 4\] are expected"),
        (_taps(1, 4, 2), r"\(1, 4, 2\); torch.float32 \(1, 4, 3\) is expected"),
        ([*_taps(1, 4, 3, count=1), *_taps(1, 5, 3, count=1)], "tap 1 is"),
        (_taps(1, 4, 3, dtype=torch.int32), "tap 0: torch.int32; one of bfloat16"),
        (_taps(4, 3), "tap 0 is"),
    ],
)
def test_taps_that_cannot_be_are_refused(taps, words) -> None:
    with pytest.raises(ValueError, match=words):
        check_taps(SPEC, taps)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"begins": [-1]}, "lane 1 begins at position -1"),
        ({"lanes": [3]}, "lane 3: 0 to 2 are there"),
        ({"paths": [range(5)]}, "takes rows 0 to 4 of taps with 4"),
        ({"paths": [[-1]]}, "takes rows -1 to -1"),
        ({"paths": [range(2), range(2)]}, "1 lanes, 1 begins and 2 paths for 1 entries"),
        (
            {"num_entries": 2, "lanes": [1, 1], "begins": [0, 4], "paths": [[0], [0]]},
            "each may come once",
        ),
    ],
)
def test_rows_that_cannot_be_are_refused(change, words) -> None:
    arguments = {"num_entries": 1, "lanes": [1], "begins": [0], "paths": [[0]]} | change
    with pytest.raises(ValueError, match=words):
        check_rows(3, num_rows=4, **arguments)


def test_padding_may_stand_anywhere() -> None:
    check_rows(3, 2, 4, [-1, -1], [-5, 0], [range(9), ()])


def test_a_lane_holds_the_last_positions_that_were_written():
    spans = LaneSpans(2, 8)
    spans.advance(1, 0, 5)
    spans.advance(1, 5, 6)
    assert spans.valid(1) == range(3, 11)
    assert spans.valid(0) == range(0)
    spans.reset(1)
    assert spans.valid(1) == range(0)


def test_a_gap_begins_anew():
    spans = LaneSpans(1, 8)
    spans.advance(0, 0, 5)
    spans.advance(0, 7, 2)
    assert spans.valid(0) == range(7, 9)


@pytest.mark.parametrize(
    ("begin", "end", "expected"), [(0, 11, range(3, 11)), (6, 9, range(6, 9)), (0, 3, range(3, 3))]
)
def test_a_node_carries_what_reaches_its_end(begin: int, end: int, expected: range):
    spans = LaneSpans(1, 8)
    spans.advance(0, 0, 11)
    assert spans.held(0, begin, end) == expected
    assert not spans.held(0, begin, 12)


@pytest.mark.parametrize(("num_lanes", "capacity"), [(0, 8), (1, 0)])
def test_sizes_under_one_are_refused(num_lanes: int, capacity: int):
    with pytest.raises(ValueError, match="at least 1 of each"):
        LaneSpans(num_lanes, capacity)


@pytest.mark.parametrize("lane", [-1, 2])
def test_a_lane_that_is_not_there_is_refused(lane: int):
    with pytest.raises(ValueError, match="0 to 1 are there"):
        LaneSpans(2, 8).valid(lane)


@st.composite
def steps(draw):
    """A scatter of up to three entries, in any lanes or none, with its store."""
    capacity, rows = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    max_rows, hidden = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    lanes = draw(st.permutations([-1, 0, 2, -1, 1]))[: draw(st.integers(1, 4))]
    counts = [draw(st.integers(0, max_rows)) for _ in lanes]
    begins = [draw(st.integers(0, 1 << 40)) for _ in lanes]
    paths = [[draw(st.integers(0, rows - 1)) for _ in range(max_rows)] for _ in lanes]
    taps = [torch.randn(len(lanes), rows, hidden) for _ in range(draw(st.integers(1, 3)))]
    indices = (torch.tensor(x, dtype=torch.int32) for x in (lanes, counts, paths))
    lanes, counts, paths = indices
    store = torch.full((3 * capacity + 1, len(taps) * hidden), 7.0)
    return taps, lanes, torch.tensor(begins), counts, paths, store, capacity


@pytest.mark.slow
@given(steps(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=150, deadline=None)
def test_every_row_comes_to_the_place_of_its_position(step, dtype) -> None:
    *arguments, store, capacity = step
    found, truth = store.to(dtype), store.to(dtype)
    rows = torch_scatter(*arguments, found, capacity)
    feature_ring.scatter(*arguments, truth, capacity)
    assert torch.equal(found[:-1], truth[:-1])  # the last row is spare
    _, lanes, begins, counts, _ = arguments
    for entry, j in feature_ring.written(lanes, counts, capacity):
        place = lanes[entry] * capacity + (begins[entry] + j) % capacity
        assert torch.equal(rows[entry, j], found[place])


def test_slots_past_the_count_may_hold_anything() -> None:
    store = torch.zeros(5, 1)
    one = torch.ones(1, dtype=torch.int32)
    paths = torch.tensor([[0, -7, 1 << 30]], dtype=torch.int32)
    torch_scatter([torch.ones(1, 1, 1)], one * 0, one.long() * 2, one, paths, store, 4)
    assert store[:4].flatten().tolist() == [0, 0, 1, 0]
