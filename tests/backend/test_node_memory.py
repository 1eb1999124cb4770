"""Regions lie where the other end says, or nowhere."""

from __future__ import annotations

import pytest

from luceasync.backend.node_orders import LentMemory
from luceasync.ipc.memory import SealedMemory


def test_regions_lie_where_they_were_told():
    lent = SealedMemory.create("nodes", 8192)
    memory = LentMemory(lent)
    memory.tell([4096, 0])
    memory.allocate(4)[:] = b"more"
    memory.allocate(4)[:] = b"some"
    assert bytes(lent.view[:4]) == b"some" and bytes(lent.view[4096:4100]) == b"more"
    lent.close()


def test_a_place_that_is_none_is_refused():
    lent = SealedMemory.create("nodes", 8192)
    memory = LentMemory(lent)
    memory.tell([4096, 8190])
    memory.allocate(4096)
    with pytest.raises(ValueError, match="4 bytes at 8190 of a memory of 8192"):
        memory.allocate(4)
    with pytest.raises(ValueError, match="no place"):
        memory.allocate(4)
    lent.close()
