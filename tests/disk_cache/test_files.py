"""Memory, directories and threaded files."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.disk_cache.files import (
    MEASURED_FROM_BYTES,
    PIECE_BYTES,
    SMALL_BYTES,
    FileSystem,
    FileThreads,
    ThreadedFile,
    allocate,
    pieces,
    timed_read,
)
from tests.disk_cache.faulty_files import hanging


def test_memory_is_zero_writable_and_begins_on_a_page() -> None:
    memory = allocate(5000)
    assert bytes(memory) == bytes(5000)
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 4096 == 0


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(MemoryError, match="bytes: "):
        allocate(1 << 62)


def test_directory_entries_are_sorted_by_name(tmp_path: Path) -> None:
    for name in "bca":
        (tmp_path / name).touch()
    assert [entry.name for entry in FileSystem().entries(tmp_path)] == ["a", "b", "c"]


SIZES = [0, 1, SMALL_BYTES - 1, SMALL_BYTES, PIECE_BYTES, PIECE_BYTES + 1]


@pytest.mark.slow
@given(st.lists(st.sampled_from(SIZES), max_size=6))
def test_pieces_are_the_buffers_bytes_in_order(sizes: list[int]) -> None:
    buffers = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    found = list(pieces(buffers))
    assert b"".join(found) == b"".join(buffers)
    assert max(map(len, found), default=0) <= PIECE_BYTES


def test_small_buffers_are_joined_and_large_ones_not_copied() -> None:
    small, large = b"s" * 4096, bytearray(2 * PIECE_BYTES)
    joined, *views = pieces([small] * 8 + [large])
    assert joined == small * 8
    assert [view.obj is large for view in views] == [True, True]


def test_a_timed_read_takes_so_much_of_each_file_and_ends_in_time(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path, num_bytes in zip(paths, (10_000, 3_000, 0), strict=True):
        path.write_bytes(bytes(MEASURED_FROM_BYTES * bool(num_bytes) + num_bytes))
    num_bytes, elapsed_s = timed_read(FileSystem(), paths, 4_000, 60.0)
    assert num_bytes == 4_000 + 3_000 and elapsed_s > 0
    assert timed_read(FileSystem(), paths, 4_000, 0.0)[0] == 0
    with pytest.raises(FileNotFoundError):
        timed_read(FileSystem(), [tmp_path / "gone"], 4_000, 60.0)


async def test_a_file_is_not_closed_under_a_call(tmp_path: Path, until: threading.Event) -> None:
    threads, reached = FileThreads(), threading.Event()
    raw = FileIO(tmp_path / "file", "wb")

    async def hang() -> None:
        async with ThreadedFile(threads, lambda: raw) as file:
            await file.call(lambda: (reached.set(), until.wait()))

    hanging = asyncio.create_task(hang())
    await asyncio.to_thread(reached.wait)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert not raw.closed
    until.set()
    await threads.close(60)
    assert raw.closed


async def test_a_disk_that_never_answers_does_not_hold_up_closing(until: threading.Event) -> None:
    threads = FileThreads()
    opening = ThreadedFile(threads, hanging(until))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), opening:
            pass
    await threads.close(0.01)
    assert not until.is_set()


async def test_a_file_that_could_not_be_opened_is_discarded(tmp_path: Path) -> None:
    threads, discarded = FileThreads(), threading.Event()
    with pytest.raises(FileNotFoundError):
        async with ThreadedFile(threads, lambda: FileIO(tmp_path / "no", "rb"), discarded.set):
            pass
    assert discarded.is_set()
    await threads.close(60)
