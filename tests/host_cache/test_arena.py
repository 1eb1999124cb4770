"""Memory with its pages ahead of use: separate regions, freed with their last view."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.host_cache.arena import (
    ALIGNMENT_BYTES,
    PIECE_BYTES,
    Arena,
    Holes,
    LockedAhead,
    PlainMemory,
    WarmMemory,
    locked_pages,
)

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
def arena() -> Iterator[Arena]:
    arena = Arena(CAPACITY_BYTES, NotedLock(), slab_bytes=PIECE_BYTES)
    assert arena.wait(30)
    yield arena
    arena.close()


def address_of(region: memoryview) -> int:
    return np.frombuffer(region, np.uint8).ctypes.data


# --- warm memory --------------------------------------------------------------------------------


@pytest.fixture
def warm() -> Iterator[WarmMemory]:
    warm = WarmMemory(2 * PIECE_BYTES, capacity_bytes=4 * PIECE_BYTES)
    assert warm.wait(30)
    yield warm
    warm.close()


def resident_bytes(pages: np.ndarray) -> int:
    """How much of an array that begins at a page is in memory, by mincore(2). What the whole
    process has changes with what other tests free.
    """
    num_pages = -(-pages.nbytes // mmap.PAGESIZE)
    found = np.zeros(num_pages, np.uint8)
    length, vector = ctypes.c_size_t(pages.nbytes), ctypes.c_void_p(found.ctypes.data)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pages.ctypes.data), length, vector) == 0
    return int((found & 1).sum()) * mmap.PAGESIZE


def test_warm_memory_has_its_pages_ahead_of_use():
    warm = WarmMemory(4 * PIECE_BYTES, capacity_bytes=4 * PIECE_BYTES)
    assert warm.wait(30)
    pages = np.frombuffer(warm.allocate(4 * PIECE_BYTES), np.uint8)
    assert resident_bytes(pages) == pages.nbytes
    warm.close()


def test_plain_memory_has_no_pages_before_they_are_used():
    pages = np.frombuffer(PlainMemory().allocate(4 * PIECE_BYTES), np.uint8)
    assert resident_bytes(pages) == 0


def test_what_does_not_fit_the_warm_part_lies_beside_it(warm: WarmMemory):
    regions = [warm.allocate(PIECE_BYTES) for _ in range(3)]
    for mark, region in enumerate(regions):
        region[:] = bytes([mark]) * PIECE_BYTES
    assert [region[-1] for region in regions] == [0, 1, 2]
    assert "8388608 bytes beside it" in repr(warm)


def process_bytes() -> int:
    """What the whole process has in memory."""
    return psutil.Process().memory_info().rss


def test_free_pages_are_returned_if_they_would_exceed_the_capacity(warm: WarmMemory):
    prepared_bytes = process_bytes()
    held = [np.frombuffer(warm.allocate(5 * PIECE_BYTES // 2), np.uint8)]
    held[0][:] = 1
    assert process_bytes() - prepared_bytes < PIECE_BYTES  # not 2.5: the 2 that were free are gone
    held.append(np.frombuffer(warm.allocate(PIECE_BYTES), np.uint8))
    assert not held[1].any()
    held[1][:] = 2
    assert held[0].all()


def test_freed_memory_beside_the_warm_part_is_not_counted(warm: WarmMemory):
    for _ in range(3):
        warm.allocate(5 * PIECE_BYTES // 2)
    assert f"{5 * PIECE_BYTES // 2} bytes beside it" in repr(warm)


@pytest.mark.parametrize("warm_bytes", [1, 4097])
def test_a_warm_part_of_any_size_is_whole_pages(warm_bytes: int):
    warm = WarmMemory(warm_bytes, capacity_bytes=PIECE_BYTES)
    assert warm.allocate(4096).nbytes == 4096
    assert repr(warm) == "WarmMemory(Arena(1 of 1 slabs), 0 bytes beside it)"
    warm.close()


# --- the arena ----------------------------------------------------------------------------------


def test_slabs_end_where_no_piece_is_cut():
    pages = NotedLock()
    arena = Arena(CAPACITY_BYTES, pages, slab_bytes=PIECE_BYTES)
    assert arena.wait(30)
    assert all(address % PIECE_BYTES == 0 for address in pages.locked)
    assert sum(pages.locked.values()) == arena.free_bytes == CAPACITY_BYTES
    arena.close()
    assert pages.locked == {}


@pytest.mark.slow
def test_beside_spare_memory_more_waits_for_a_quiet_moment():
    quiet, pages = threading.Event(), NotedLock()
    arena = Arena(CAPACITY_BYTES, pages, PIECE_BYTES, quiet, spare_bytes=PIECE_BYTES)
    assert not arena.wait(0.3)
    assert arena.free_bytes == PIECE_BYTES
    held = arena.allocate(1)
    assert not arena.wait(0.3)
    assert arena.free_bytes < PIECE_BYTES
    more = arena.allocate(PIECE_BYTES // 2)  # now less than half is free of what there should be
    deadline = time.monotonic() + 30
    while arena.free_bytes < PIECE_BYTES and time.monotonic() < deadline:
        time.sleep(0.01)
    assert PIECE_BYTES <= arena.free_bytes < 2 * PIECE_BYTES
    quiet.set()
    assert arena.wait(30) and sum(pages.locked.values()) == CAPACITY_BYTES
    del held, more
    arena.close()


def test_a_refused_allocation_makes_it_grow_at_once():
    arena = Arena(CAPACITY_BYTES, NotedLock(), PIECE_BYTES, threading.Event(), PIECE_BYTES)
    assert not arena.wait(0.3)
    with pytest.raises(MemoryError):
        arena.allocate(2 * PIECE_BYTES)
    deadline = time.monotonic() + 30
    while arena.free_bytes < 2 * PIECE_BYTES and time.monotonic() < deadline:
        time.sleep(0.01)
    assert arena.allocate(2 * PIECE_BYTES).nbytes == 2 * PIECE_BYTES
    arena.close()


def test_a_reader_waits_for_memory_that_is_being_prepared():
    arena = Arena(CAPACITY_BYTES, NotedLock(), PIECE_BYTES, threading.Event(), PIECE_BYTES)
    with pytest.raises(MemoryError):
        arena.allocate(CAPACITY_BYTES)  # a caller that must not wait
    assert arena.allocate_soon(CAPACITY_BYTES).nbytes == CAPACITY_BYTES
    arena.close()


def test_a_reader_waits_for_nothing_that_will_not_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("luceasync.host_cache.arena.SOON_S", 60.0)
    arena, started_s = Arena(CAPACITY_BYTES, NotedLock(), PIECE_BYTES), time.monotonic()
    assert arena.wait(30)
    with pytest.raises(MemoryError):
        arena.allocate_soon(2 * CAPACITY_BYTES)
    arena.close()
    with pytest.raises(MemoryError):
        arena.allocate_soon(1)
    assert time.monotonic() - started_s < 30


def test_an_arena_that_waits_for_a_quiet_moment_can_be_closed():
    arena = Arena(CAPACITY_BYTES, NotedLock(), PIECE_BYTES, threading.Event(), spare_bytes=1)
    arena.close()
    assert arena.wait(0)


def test_regions_lie_in_locked_pages_side_by_side(arena: Arena):
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
def test_a_region_is_freed_with_its_last_view(arena: Arena, view):
    last = view(arena.allocate(100))
    assert arena.free_bytes == CAPACITY_BYTES - ALIGNMENT_BYTES
    del last
    assert arena.free_bytes == CAPACITY_BYTES


def test_without_room_it_is_a_memory_error_until_something_goes(arena: Arena):
    held = [arena.allocate(PIECE_BYTES), arena.allocate(PIECE_BYTES)]
    with pytest.raises(MemoryError, match="no room for"):
        arena.allocate(PIECE_BYTES)
    address = address_of(held.pop(0))
    assert address_of(arena.allocate(PIECE_BYTES)) == address


def test_pages_that_the_system_refuses_make_it_smaller_not_useless(caplog):
    arena = Arena(CAPACITY_BYTES, NotedLock(2 * PIECE_BYTES), slab_bytes=PIECE_BYTES)
    assert arena.wait(30)
    assert arena.free_bytes == 2 * PIECE_BYTES
    assert "locked 2 of 3 slabs: enough is locked" in caplog.text
    arena.close()


def test_if_nothing_can_be_pinned_there_is_no_arena():
    with pytest.raises(MemoryError, match="enough is locked"):
        Arena(CAPACITY_BYTES, NotedLock(PIECE_BYTES - 1), slab_bytes=PIECE_BYTES)


def test_a_closed_arena_allocates_nothing_and_its_regions_stay():
    arena = Arena(PIECE_BYTES, NotedLock())
    region = arena.allocate(64)
    region[:] = bytes(range(64))
    arena.close()
    arena.close()
    with pytest.raises(MemoryError):
        arena.allocate(64)
    del arena
    assert bytes(region) == bytes(range(64))


def test_returned_pages_are_unused_ones(arena: Arena):
    first, second, third = (np.frombuffer(arena.allocate(4096), np.uint8) for _ in range(3))
    first[:], second[:], third[:] = 1, 2, 3
    del second
    arena.give_up_pages()
    assert first.min() == 1 and third.min() == 3
    assert not np.frombuffer(arena.allocate(4096), np.uint8).any()


@pytest.fixture
def shared() -> Iterator[tuple[int, mmap.mmap]]:
    """The descriptor of memory that other processes can map, and a mapping of it."""
    fd = os.memfd_create("nodes")
    os.ftruncate(fd, CAPACITY_BYTES)
    yield fd, mmap.mmap(fd, CAPACITY_BYTES)
    os.close(fd)


def test_shared_memory_has_the_same_offsets_in_every_process(shared):
    fd, mapping = shared
    pages = NotedLock()
    arena = Arena(CAPACITY_BYTES, pages, slab_bytes=PIECE_BYTES, mapping=mapping)
    assert arena.wait(30) and arena.free_bytes == CAPACITY_BYTES
    regions = [arena.allocate(10_000) for _ in range(3)]
    theirs = mmap.mmap(fd, CAPACITY_BYTES)
    for mark, region in enumerate(regions):
        region[:] = bytes([mark + 1]) * 10_000
        offset = arena.offset_of(region[100:])
        assert offset == arena.offset_of(region) + 100
        assert theirs[offset - 100 : offset + 9_900] == bytes([mark + 1]) * 10_000
    # Copies by devices stop at the same addresses, wherever the memory begins.
    first, *others = pages.locked
    assert others and all(address % PIECE_BYTES == 0 < address - first for address in others)
    arena.close()


def test_what_lies_in_it_outlives_the_process_that_wrote_it(shared):
    fd, mapping = shared
    arena = Arena(CAPACITY_BYTES, NotedLock(), mapping=mapping)
    region = arena.allocate(4096)
    code = (
        "import mmap, os, signal, sys\n"
        "fd, size, offset = map(int, sys.argv[1:])\n"
        "mmap.mmap(fd, size)[offset : offset + 4096] = bytes([7]) * 4096\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    numbers = map(str, (fd, CAPACITY_BYTES, arena.offset_of(region)))
    command = [sys.executable, "-c", code, *numbers]
    done = subprocess.run(command, pass_fds=[fd], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert bytes(region) == bytes([7]) * 4096
    arena.close()


def test_a_region_of_other_memory_has_no_offset(arena: Arena):
    with pytest.raises(AssertionError, match="not from this memory"):
        arena.offset_of(memoryview(bytearray(10)))


def test_an_arena_whose_pages_do_not_come_says_so(monkeypatch: pytest.MonkeyPatch):
    class SlowLock(NotedLock):
        def lock(self, address: int, num_bytes: int) -> None:
            super().lock(address, num_bytes)
            assert len(self.locked) == 1 or goes_on.wait(30)

    goes_on, pages = threading.Event(), SlowLock()
    arena = Arena(2 * PIECE_BYTES, pages, slab_bytes=PIECE_BYTES)
    monkeypatch.setattr("luceasync.host_cache.arena.CLOSE_TIMEOUT_S", 0.01)
    with pytest.raises(TimeoutError, match=r"has not locked 8 MiB of memory within 0\.01 s"):
        arena.close()
    assert pages.locked
    goes_on.set()
    assert arena.wait(30)
    arena.close()
    assert pages.locked == {}


def test_threads_never_hold_the_same_bytes(arena: Arena):
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


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_holes_are_what_was_freed_and_not_taken(data: st.DataObject):
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
def test_free_bytes_cannot_be_freed_again(twice: tuple[int, int]):
    holes = Holes()
    holes.give(2, 8)
    with pytest.raises(AssertionError, match="free already"):
        holes.give(*twice)


@pytest.mark.parametrize("num_bytes", [1, 4095, 4097, 5 << 20])
def test_plain_memory_is_a_page_aligned_region_of_that_size(num_bytes: int):
    region = PlainMemory().allocate(num_bytes)
    assert region.nbytes == num_bytes and not region.readonly and region.format == "B"
    assert address_of(region) % ALIGNMENT_BYTES == 0


def test_plain_memory_is_freed_with_its_last_view():
    region = PlainMemory().allocate(1 << 20)
    mapping = weakref.ref(region.obj)
    tensor = torch.frombuffer(region, dtype=torch.uint8)[100:200]
    del region
    assert mapping() is not None
    del tensor
    assert mapping() is None


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 63])
def test_more_than_the_machine_has_is_a_memory_error(num_bytes: int):
    with pytest.raises(MemoryError, match="no room for"):
        PlainMemory().allocate(num_bytes)


def test_pages_of_a_size_that_comes_again_are_locked_ahead_and_freed_at_the_end():
    lock = NotedLock()
    ahead = LockedAhead(lock)
    first = ahead.take(PIECE_BYTES)
    second = ahead.take(PIECE_BYTES)
    assert {first.ctypes.data, second.ctypes.data} <= set(lock.locked)
    with pytest.raises(MemoryError, match="enough is locked"):  # one piece more fits not
        ahead.take(PIECE_BYTES)
    ahead.close()
    assert set(lock.locked) == {first.ctypes.data, second.ctypes.data}


def test_pages_are_locked_until_the_last_tensor_over_them_goes():
    lock = NotedLock()
    pages = locked_pages(PIECE_BYTES, lock)
    assert lock.locked == {pages.ctypes.data: PIECE_BYTES}
    assert resident_bytes(pages) == PIECE_BYTES
    tensor = torch.from_numpy(pages)[16:32]
    del pages
    assert lock.locked
    del tensor
    assert not lock.locked
    with pytest.raises(MemoryError, match="enough is locked"):
        locked_pages(2 * CAPACITY_BYTES, lock)
