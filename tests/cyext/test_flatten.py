"""Tensors in one buffer: aligned, copied completely or not at all, hashed, and viewed in place."""

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from luceasync.cyext.flatten import checksums, fill, fill_with_checksums, layout, views
from tests.reference import flatten as slow

FILLS = [fill, fill_with_checksums]
SOURCES = st.lists(st.binary(max_size=9), max_size=6)
SIZES = st.lists(st.integers(0, 100), max_size=8)
LARGE_BYTES = 300 * 1024 + 5  # large enough to bypass the cache
GROUP_BYTES = 8 << 20


def named(sizes: list[int]) -> list[tuple[str, int]]:
    return [(f"t{i}", size) for i, size in enumerate(sizes)]


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def random_bytes(num_bytes: int) -> np.ndarray:
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)


@pytest.fixture
def ticks() -> Iterator[list[int]]:
    """A counter that advances only while the test's thread releases the GIL."""
    count, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # seconds: no thread is preempted
    thread = threading.Thread(target=tick)
    thread.start()
    yield count
    stop.set()
    thread.join()
    sys.setswitchinterval(usual)


@given(SIZES, st.integers(0, 7).map(lambda power: 2**power))
def test_a_layout_is_the_slow_truths(sizes: list[int], alignment: int) -> None:
    assert layout(named(sizes), alignment) == slow.layout(named(sizes), alignment)


@pytest.mark.parametrize(
    ("specs", "alignment", "words"),
    [
        ([("a", 1), ("a", 2)], 8, "'a': is there twice"),
        ([("a", -1)], 8, "'a': -1 bytes"),
        ([("a", 2**63)], 8, f"an end at {sys.maxsize} or before"),
        ([("a", 2**63 - 9), ("b", 8)], 8, f"'b': 8 bytes from {2**63 - 8}"),
        ([], 0, "alignment 0: expected a power of two"),
        ([], -8, "alignment -8"),
        ([], 24, "alignment 24"),
    ],
)
def test_impossible_sizes_are_refused(specs, alignment, words) -> None:
    with pytest.raises(ValueError, match=words):
        layout(specs, alignment)


@pytest.mark.parametrize("fill", FILLS)
@given(sources=SOURCES, offsets=st.lists(st.integers(-2, 40), min_size=6, max_size=6))
def test_any_places_give_the_slow_truth_or_are_refused_untouched(fill, sources, offsets) -> None:
    before = bytes(range(1, 41))
    target, offsets = bytearray(before), sorted(offsets)[: len(sources)]
    expected = slow.fill(before, offsets, sources)
    if expected is None:
        with pytest.raises(ValueError, match="source"):
            fill(target, offsets, sources)
    else:
        fill(target, offsets, sources)
    assert target == (before if expected is None else expected)


@given(SOURCES, st.integers(0, 4).map(lambda power: 2**power))
def test_what_is_filled_is_viewed_again(sources: list[bytes], alignment: int) -> None:
    specs = named([len(source) for source in sources])
    offsets, total = layout(specs, alignment)
    target = bytearray(b"\xff" * total)
    assert fill_with_checksums(target, offsets, sources) == [digest(s) for s in sources]
    places = zip(specs, offsets, strict=True)
    table = [(name, begin, num_bytes) for (name, num_bytes), begin in places]
    assert [bytes(view) for view in views(target, table).values()] == sources


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("offset", [0, 1, 63, 64, 4095])
def test_large_sources_land_at_any_alignment_between_their_neighbours(fill, offset) -> None:
    source = random_bytes(LARGE_BYTES)
    target = np.full(LARGE_BYTES + 8192, 0xEE, np.uint8)
    fill(target, [offset], [source])
    assert np.array_equal(target[offset : offset + LARGE_BYTES], source)
    assert set(target[:offset].tolist()) <= {0xEE}
    assert set(target[offset + LARGE_BYTES :].tolist()) == {0xEE}


def test_groups_of_every_size_are_copied_and_hashed() -> None:
    sizes = [0, GROUP_BYTES + 1, 7, GROUP_BYTES - 7, 1, 0, LARGE_BYTES, GROUP_BYTES, 3]
    sources = [random_bytes(size) for size in sizes]
    offsets, total = layout(named(sizes), 64)
    target, copied = np.ones((2, total), np.uint8)
    assert fill_with_checksums(target, offsets, sources) == [digest(s) for s in sources]
    fill(copied, offsets, sources)
    assert np.array_equal(target, copied)
    table = zip(offsets, sources, strict=True)
    assert all(np.array_equal(target[begin : begin + s.size], s) for begin, s in table)


@pytest.mark.parametrize("fill", FILLS)
def test_padding_becomes_zero_and_what_lies_around_stays(fill) -> None:
    target = bytearray(b"x" * 12)
    fill(target, [2, 6, 10], [b"ab", b"", b"c"])
    assert target == b"xxab\0\0\0\0\0\0cx"


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    ("offsets", "sources", "words"),
    [
        ([0], [], "0 sources for 1 offsets"),
        ([0, 3], [b"abcd", b"e"], "source 1: begins at 3, before the end .* at 4"),
        ([4, 0], [b"a", b"b"], "source 1: begins at 0"),
        ([0, 7], [b"a", b"bc"], r"source 1: bytes \[7, 9\) are not inside the target of 8"),
        ([-1], [b"a"], r"source 0: bytes \[-1, 0\)"),
        ([2**63 - 1], [b"a"], "not inside"),
        ([2**70], [b"a"], "not inside"),
        ([0], [b"123456789"], "not inside"),
        ([0, 4], [b"a", np.zeros((4, 4))[:, :2]], "source 1: expected a C-contiguous buffer"),
        ([0, 4], [b"a", np.zeros((2, 2), np.uint8, order="F")], "source 1: expected"),
        ([0, 4], [b"a", 7], "source 1: expected a C-contiguous buffer, got int"),
    ],
)
def test_a_fill_that_cannot_complete_writes_nothing(fill, offsets, sources, words) -> None:
    target = bytearray(b"x" * 8)
    with pytest.raises(ValueError, match=words):
        fill(target, offsets, sources)
    target += b"!"  # fails while a buffer is still held open
    assert target == b"xxxxxxxx!"


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("target", [b"1234", memoryview(b"1234"), np.zeros((4, 4))[:, ::2]])
def test_a_target_must_be_writable_and_contiguous(fill, target) -> None:
    with pytest.raises(ValueError, match="target: expected a writable, C-contiguous buffer"):
        fill(target, [0], [b"a"])


@pytest.mark.parametrize("begin", [0, 2, 7])
def test_a_source_inside_the_target_is_refused(begin: int) -> None:
    target = bytearray(8)
    with pytest.raises(ValueError, match="source 0: shares memory with the target"):
        fill(target, [0], [memoryview(target)[begin : begin + 1]])


def test_a_source_that_ends_where_the_target_begins_is_apart() -> None:
    memory = memoryview(bytearray(b"abcd...."))
    fill(memory[4:], [0], [memory[:4]])
    assert memory == b"abcdabcd"


def test_sources_may_be_of_any_shape_and_type() -> None:
    sources = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 2), np.uint16), b"z"]
    target = bytearray(24 + 8 + 1)
    found = fill_with_checksums(target, [0, 24, 32], sources)
    assert target == sources[0].tobytes() + sources[1].tobytes() + b"z"
    assert found == checksums(sources) == [digest(bytes(memoryview(s))) for s in sources]


def test_checksums_refuse_what_is_not_contiguous() -> None:
    with pytest.raises(ValueError, match="buffer 1: expected a C-contiguous buffer, got ndarray"):
        checksums([b"a", np.zeros(4)[::2]])


@pytest.mark.slow
def test_other_threads_run_during_a_fill(ticks: list[int]) -> None:
    source = np.ones(64 << 20, np.uint8)
    target = np.zeros_like(source)

    def ticked() -> bool:
        before = ticks[0]
        fill(target, [0], [source])
        return ticks[0] > before

    assert any(ticked() for _ in range(1000))  # the other thread may be late, not 1000 times


@given(
    st.binary(max_size=20),
    st.lists(st.tuples(st.integers(-1, 25), st.integers(-1, 25)), max_size=4),
)
def test_views_are_the_slow_truths_or_refused(buffer: bytes, places: list) -> None:
    table = [(f"t{i}", *place) for i, place in enumerate(places)]
    expected = slow.views(buffer, table)
    if expected is None:
        with pytest.raises(ValueError, match="not inside the buffer"):
            views(buffer, table)
    else:
        assert views(buffer, table) == expected


def test_a_view_is_the_buffers_own_memory() -> None:
    buffer = bytearray(8)
    found = views(buffer, [("a", 2, 3)])
    found["a"][0] = 7
    assert buffer[2] == 7
    assert views(bytes(8), [("a", 2, 3)])["a"].readonly


@pytest.mark.parametrize(
    ("buffer", "table", "words"),
    [
        (bytes(8), [("a", 0, 1), ("a", 1, 1)], "'a': is there twice"),
        (bytes(8), [("a", 4, -1)], "'a': -1 bytes from 4"),
        (bytes(8), [("a", -1, 4)], "'a': 4 bytes from -1"),
        (bytes(8), [("a", 2**63, 2**63)], "'a': .* are not inside the buffer of 8"),
        (np.zeros(4), [], "expected contiguous bytes, got ndarray of 1 dimensions with items of 8"),
        (np.zeros((2, 2), np.uint8), [], "of 2 dimensions"),
        (np.zeros(8, np.uint8)[::2], [], "expected contiguous bytes"),
    ],
)
def test_views_only_of_bytes_and_once_a_name(buffer, table, words) -> None:
    with pytest.raises(ValueError, match=words):
        views(buffer, table)
