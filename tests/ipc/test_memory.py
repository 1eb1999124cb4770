"""Shared memory has a fixed size, and is freed with its owners."""

from __future__ import annotations

import fcntl
import os
import sys

import pytest

from luceasync.errors import ChannelClosed, ConfigError
from luceasync.ipc.memory import SealedMemory, seals

NUM_BYTES = 8192


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_two_mappings_are_the_same_memory() -> None:
    first = SealedMemory.create("test", NUM_BYTES)
    second = SealedMemory.inherit(os.dup(first.fd), NUM_BYTES)
    first.view[5] = 9
    assert second.view[5] == 9
    first.close()
    assert second.view[5] == 9
    second.close()


def test_its_size_cannot_change() -> None:
    memory = SealedMemory.create("test", NUM_BYTES)
    for size in (0, 2 * NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.close()


def test_memory_that_could_shrink_under_a_reader_is_refused_and_closed() -> None:
    before = num_fds()
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NUM_BYTES)
    with pytest.raises(ChannelClosed, match=f"seals are 0x0, not {seals():#x}"):
        SealedMemory.inherit(fd, NUM_BYTES)
    assert num_fds() == before


def test_memory_of_another_size_is_refused() -> None:
    memory = SealedMemory.create("test", NUM_BYTES)
    with pytest.raises(ChannelClosed, match="8192 bytes, 4096 were expected"):
        SealedMemory.inherit(os.dup(memory.fd), 4096)
    memory.close()


def test_what_is_no_memory_is_refused() -> None:
    with pytest.raises(ChannelClosed, match="cannot be shared"):
        SealedMemory.inherit(os.dup(0), os.fstat(0).st_size)


def test_a_device_registers_it_once_and_is_told_before_it_goes() -> None:
    memory, told = SealedMemory.create("test", NUM_BYTES), []

    def register(view: memoryview):
        told.append(("pinned", view.nbytes))
        return lambda: told.append(("unpinned", memory.view.nbytes))

    memory.register(register)
    memory.register(register)
    memory.close()
    memory.close()
    assert told == [("pinned", NUM_BYTES), ("unpinned", NUM_BYTES)]


def test_no_descriptor_is_left_even_if_a_view_is_still_held() -> None:
    before = num_fds()
    memory = SealedMemory.create("test", NUM_BYTES)
    view = memory.view[:100]
    memory.close()
    view[0] = 1  # the mapping is there as long as the view is
    del view
    assert num_fds() == before


def test_another_system_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"need Linux .* not darwin"):
        SealedMemory.create("test", NUM_BYTES)
