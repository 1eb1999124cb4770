"""Memory in large pages: what it holds stays, and what cannot be is passed over."""

import mmap
from pathlib import Path

import pytest
import torch

from luceasync.process_memory import LARGE_PAGE_BYTES, into_large_pages

SUPPORT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def large_bytes_at(address: int) -> int:
    """Of the mapping that `address` lies in, as the system tells it."""
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


def test_numbers_stay_what_they_were():
    numbers = torch.arange(3 * LARGE_PAGE_BYTES // 8)
    into_large_pages(numbers.data_ptr(), numbers.nbytes)
    assert torch.equal(numbers, torch.arange(3 * LARGE_PAGE_BYTES // 8))


@pytest.mark.skipif(not has_collapse(), reason="this system puts no pages together")
def test_written_memory_lies_in_large_pages_afterwards():
    memory = mmap.mmap(-1, 8 * LARGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
    before = large_bytes_at(tensor.data_ptr())
    into_large_pages(tensor.data_ptr(), tensor.nbytes)
    if large_bytes_at(tensor.data_ptr()) == before:
        pytest.skip("the system has no large page to give")
    assert bool((tensor == 7).all())
    del tensor
    memory.close()


def test_memory_that_is_not_there_is_passed_over():
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    into_large_pages(tensor.data_ptr(), 1)
    assert int(tensor.sum()) == mmap.PAGESIZE
    del tensor
    memory.close()
