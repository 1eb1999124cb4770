"""Memory and directories, as the operating system gives them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from luceasync.disk_cache.files import FileSystem, allocate


def test_memory_is_zero_writable_and_begins_on_a_page() -> None:
    memory = allocate(5000)
    assert bytes(memory) == bytes(5000)
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 4096 == 0


def test_memory_that_there_is_not_is_refused_as_such() -> None:
    with pytest.raises(MemoryError, match="bytes: "):
        allocate(1 << 62)


def test_what_a_directory_holds_is_told_by_name(tmp_path: Path) -> None:
    for name in "bca":
        (tmp_path / name).touch()
    assert [entry.name for entry in FileSystem().entries(tmp_path)] == ["a", "b", "c"]
