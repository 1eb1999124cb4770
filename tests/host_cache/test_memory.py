"""Plain memory for nodes: back when the last view of it is gone."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from luceasync.host_cache.arena import ALIGNMENT_BYTES, PlainMemory


def address_of(region: memoryview) -> int:
    return np.frombuffer(region, np.uint8).ctypes.data


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


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 63])
def test_more_than_the_machine_has_is_a_memory_error(num_bytes: int):
    with pytest.raises(MemoryError, match="no room for"):
        PlainMemory().allocate(num_bytes)
