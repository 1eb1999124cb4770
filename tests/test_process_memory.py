"""Freed memory is returned, loaded objects are not scanned, large pages keep their bytes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from luceasync.process_memory import (
    LARGE_BLOCK_BYTES,
    LARGE_PAGE_BYTES,
    freeze_heap,
    frozen_imports,
    into_large_pages,
    keep_large_blocks_apart,
    resident_bytes,
    trim_heap,
    want_large_pages,
)

SUPPORT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_malloc_trim_is_called(monkeypatch):
    kept: list[int] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=kept.append))
    trim_heap()
    assert kept == [0]


def test_a_c_library_without_malloc_trim_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    trim_heap()
    keep_large_blocks_apart()


HOLES = """
import ctypes
import subprocess
import sys
from luceasync.process_memory import keep_large_blocks_apart, resident_bytes

keep_large_blocks_apart()
C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
C.free.argtypes = [ctypes.c_void_p]
C.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def filled(num_bytes):
    block = C.malloc(num_bytes)
    C.memset(block, 1, num_bytes)
    return block

C.free(filled(30 << 20))  # the C library learns from it, if it may
before = resident_bytes()
large = []
for _ in range(20):
    large.append(filled(SIZE))
    filled(1000)  # and stays
for block in large:
    C.free(block)
print(resident_bytes() - before)
"""


def test_large_blocks_leave_no_holes_among_small_ones():
    program = HOLES.replace("SIZE", str(2 * LARGE_BLOCK_BYTES))
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, timeout=60
    )
    assert int(done.stdout) < 2 * LARGE_BLOCK_BYTES


def test_resident_bytes():
    before = resident_bytes()
    with mmap.mmap(-1, 64 << 20) as block:  # new pages: the C library may have some free
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert resident_bytes() - before > len(block) // 2


@pytest.mark.slow
def test_a_frozen_heap_is_not_scanned():
    """It stays so: else every later collection would scan all that tests/conftest.py has frozen."""
    kept = [[]]
    freeze_heap()
    assert gc.get_freeze_count() > 0
    assert not any(found is kept for found in gc.get_objects())


def large_bytes_at(address: int) -> int:
    """Bytes in large pages of the mapping around `address`, according to the system."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            is_inside = begin <= address < end
        elif is_inside and head == "AnonHugePages:":
            return int(rest[0]) * 1024
    return 0


def has_collapse() -> bool:
    """Linux 6.1 or newer, with large pages."""
    release = Path("/proc/sys/kernel/osrelease")
    if not release.exists() or not SUPPORT.exists():
        return False
    major, minor = release.read_text().split(".")[:2]
    return (int(major), int(minor.split("-")[0])) >= (6, 1)


def test_collapsing_keeps_the_bytes():
    numbers = torch.arange(3 * LARGE_PAGE_BYTES // 8)
    into_large_pages(numbers.data_ptr(), numbers.nbytes)
    assert torch.equal(numbers, torch.arange(3 * LARGE_PAGE_BYTES // 8))


@pytest.mark.skipif(not has_collapse(), reason="this system puts no pages together")
def test_written_memory_moves_into_large_pages():
    memory = mmap.mmap(-1, 8 * LARGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
    before = large_bytes_at(tensor.data_ptr())
    into_large_pages(tensor.data_ptr(), tensor.nbytes)
    if large_bytes_at(tensor.data_ptr()) == before:
        pytest.skip("the system has no large page to give")
    assert bool((tensor == 7).all())
    del tensor
    memory.close()


@pytest.mark.skipif(not has_collapse(), reason="this system has no large pages")
def test_memory_is_written_in_large_pages_where_they_are_wanted():
    memory = mmap.mmap(-1, 8 * LARGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    before = large_bytes_at(tensor.data_ptr())
    want_large_pages(tensor.data_ptr(), tensor.nbytes)
    tensor.fill_(7)
    if large_bytes_at(tensor.data_ptr()) == before:
        pytest.skip("the system has no large page to give")
    assert bool((tensor == 7).all())
    del tensor
    memory.close()


def test_unsuitable_memory_is_ignored():
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    into_large_pages(tensor.data_ptr(), 1)
    want_large_pages(tensor.data_ptr(), 1)
    assert int(tensor.sum()) == mmap.PAGESIZE
    del tensor
    memory.close()


def test_nothing_is_collected_during_imports_nor_scanned_afterwards() -> None:
    num_frozen = gc.get_freeze_count()
    with frozen_imports():
        assert not gc.isenabled()
        imported = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= num_frozen + len(imported)
