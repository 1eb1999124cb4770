"""Memory for nodes: regions apart from each other, back when the last view of them is gone."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.kv.host import ALIGNMENT_BYTES, PIECE_BYTES, Holes, PinnedArena, PlainMemory

CAPACITY_BYTES = 2 * PIECE_BYTES + PIECE_BYTES // 2


class NotedLock:
    """Notes what would be locked, and refuses more than `limit_bytes` of it."""

    def __init__(self, limit_bytes: int = CAPACITY_BYTES) -> None:
        self.locked: dict[int, int] = {}
        self._limit_bytes = limit_bytes

    def lock(self, address: int, num_bytes: int) -> None:
        if sum(self.locked.values()) + num_bytes > self._limit_bytes:
            raise MemoryError("enough is locked")
        self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def arena() -> Iterator[PinnedArena]:
    arena = PinnedArena(CAPACITY_BYTES, NotedLock(), slab_bytes=PIECE_BYTES)
    assert arena.wait(30)
    yield arena
    arena.close()


def address_of(region: memoryview) -> int:
    return np.frombuffer(region, np.uint8).ctypes.data


# --- holes --------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_holes_are_what_was_given_and_not_taken(data: st.DataObject):
    holes, free, taken = Holes(), set(), []
    holes.give(0, 40)
    free.update(range(40))
    for _ in range(data.draw(st.integers(1, 25))):
        if taken and data.draw(st.booleans()):
            begin, end = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            holes.give(begin, end)
            free.update(range(begin, end))
        else:
            size = data.draw(st.integers(1, 12))
            begin = holes.take(size)
            fits = [a for a in range(40) if free.issuperset(range(a, a + size))]
            assert begin == (min(fits) if fits else None)
            if begin is not None:
                taken.append((begin, begin + size))
                free.difference_update(range(begin, begin + size))
        found = list(holes)
        assert {i for begin, end in found for i in range(begin, end)} == free
        assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
        assert holes.num_bytes == len(free)


@pytest.mark.parametrize("twice", [(2, 6), (5, 12), (0, 3)])
def test_what_is_free_already_is_not_given(twice: tuple[int, int]):
    holes = Holes()
    holes.give(2, 8)
    with pytest.raises(AssertionError, match="free already"):
        holes.give(*twice)


# --- plain memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 4095, 4097, 5 << 20])
def test_plain_memory_is_a_page_aligned_region_of_that_size(num_bytes: int):
    region = PlainMemory().allocate(num_bytes)
    assert region.nbytes == num_bytes and not region.readonly and region.format == "B"
    assert address_of(region) % ALIGNMENT_BYTES == 0


def test_plain_memory_goes_back_with_its_last_view():
    region = PlainMemory().allocate(1 << 20)
    mapping = weakref.ref(region.obj)
    tensor = torch.frombuffer(region, dtype=torch.uint8)[100:200]
    del region
    assert mapping() is not None
    del tensor
    assert mapping() is None


def test_more_than_the_machine_has_is_a_memory_error():
    with pytest.raises(MemoryError, match="no room for"):
        PlainMemory().allocate(1 << 60)


# --- the arena ----------------------------------------------------------------------------------


def test_slabs_end_where_no_piece_is_cut():
    pages = NotedLock()
    arena = PinnedArena(CAPACITY_BYTES, pages, slab_bytes=PIECE_BYTES)
    assert arena.wait(30)
    assert all(address % PIECE_BYTES == 0 for address in pages.locked)
    assert sum(pages.locked.values()) == arena.free_bytes == CAPACITY_BYTES
    arena.close()
    assert pages.locked == {}


def test_regions_lie_in_locked_pages_side_by_side(arena: PinnedArena):
    first, second = arena.allocate(1), arena.allocate(PIECE_BYTES)
    assert first.nbytes == 1 and second.nbytes == PIECE_BYTES and not second.readonly
    assert address_of(second) - address_of(first) == ALIGNMENT_BYTES
    assert arena.free_bytes == CAPACITY_BYTES - PIECE_BYTES - ALIGNMENT_BYTES


@pytest.mark.parametrize(
    "view",
    [
        lambda region: region[5:9][1:],
        lambda region: np.frombuffer(region, np.uint8)[3:][2:],
        lambda region: torch.frombuffer(region, dtype=torch.uint8)[8:16].view(torch.float32),
        lambda region: torch.frombuffer(region, dtype=torch.uint8)[4:].numpy()[3:].data,
    ],
)
def test_a_region_comes_back_with_its_last_view(arena: PinnedArena, view):
    last = view(arena.allocate(100))
    assert arena.free_bytes == CAPACITY_BYTES - ALIGNMENT_BYTES
    del last
    assert arena.free_bytes == CAPACITY_BYTES


def test_without_room_it_is_a_memory_error_until_something_goes(arena: PinnedArena):
    held = [arena.allocate(PIECE_BYTES), arena.allocate(PIECE_BYTES)]
    with pytest.raises(MemoryError, match="no room for"):
        arena.allocate(PIECE_BYTES)
    address = address_of(held.pop(0))
    assert address_of(arena.allocate(PIECE_BYTES)) == address


def test_pages_that_the_system_refuses_make_it_smaller_not_useless(caplog):
    arena = PinnedArena(CAPACITY_BYTES, NotedLock(2 * PIECE_BYTES), slab_bytes=PIECE_BYTES)
    assert arena.wait(30)
    assert arena.free_bytes == 2 * PIECE_BYTES
    assert "pinned 2 of 3 slabs: enough is locked" in caplog.text
    arena.close()


def test_if_nothing_can_be_pinned_there_is_no_arena():
    with pytest.raises(MemoryError, match="enough is locked"):
        PinnedArena(CAPACITY_BYTES, NotedLock(PIECE_BYTES - 1), slab_bytes=PIECE_BYTES)


def test_after_closing_it_gives_nothing_and_what_it_gave_stays():
    arena = PinnedArena(PIECE_BYTES, NotedLock())
    region = arena.allocate(64)
    region[:] = bytes(range(64))
    arena.close()
    arena.close()
    with pytest.raises(MemoryError):
        arena.allocate(64)
    del arena
    assert bytes(region) == bytes(range(64))


def test_threads_never_hold_the_same_bytes(arena: PinnedArena):
    wrong: list[int] = []

    def work(mark: int) -> None:
        rng = np.random.default_rng(mark)
        held: list[np.ndarray] = []
        for _ in range(300):
            region = np.frombuffer(arena.allocate(int(rng.integers(1, 40_000))), np.uint8)
            region[:] = mark
            held.append(region)
            if len(held) > 5 and (held.pop(int(rng.integers(5))) != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and arena.free_bytes == CAPACITY_BYTES
