"""Weights are read into the page cache ahead of their readers, if they are not there."""

import os
import threading
from pathlib import Path

import psutil
import pytest

from luceasync.models import prefetch
from luceasync.models.prefetch import NUM_THREADS, PIECE_BYTES, PROBE_BYTES, Prefetch

WAIT_S = 30.0
NUM_BYTES = 3 * PIECE_BYTES + 5000


def is_cached(path: Path, at: int) -> bool:
    """Whether this byte is in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


@pytest.fixture
def cold_file(tmp_path: Path) -> Path:
    """A file that the page cache has let go of."""
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.write(b"w" * NUM_BYTES)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        if is_cached(path, PIECE_BYTES):
            pytest.skip("this file system's pages cannot be let go of")
    except OSError:
        pytest.skip("this file system does not tell what is cached")
    return path


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read that is no probe."""
    found: list[int] = []
    read = os.preadv

    def watched(fd: int, views: list[memoryview], at: int, flags: int = 0) -> int:
        if not flags:
            found.append(len(views[0]))
        return read(fd, views, at, flags)

    monkeypatch.setattr(os, "preadv", watched)
    return found


def test_a_cold_file_is_cached_afterwards(cold_file: Path) -> None:
    assert Prefetch([cold_file]).wait(WAIT_S)
    assert all(is_cached(cold_file, at) for at in range(0, NUM_BYTES, PROBE_BYTES))


def test_what_is_cached_is_not_read_again(cold_file: Path, num_read: list[int]) -> None:
    with cold_file.open("rb") as file:
        file.seek(PIECE_BYTES)
        file.read(PIECE_BYTES)
        os.posix_fadvise(file.fileno(), 0, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
    assert Prefetch([cold_file]).wait(WAIT_S)
    assert PIECE_BYTES in num_read and sum(num_read) <= NUM_BYTES - PIECE_BYTES
    num_read.clear()
    assert Prefetch([cold_file]).wait(WAIT_S)
    assert num_read == []


def test_it_takes_half_of_the_memory_at_most(
    cold_file: Path, num_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = psutil.virtual_memory()._replace(available=2 * PIECE_BYTES)
    monkeypatch.setattr(prefetch.psutil, "virtual_memory", lambda: memory)
    assert Prefetch([cold_file, cold_file]).wait(WAIT_S)
    assert sum(num_read) == PIECE_BYTES


def test_a_file_that_cannot_be_read_is_left_to_its_reader(tmp_path: Path) -> None:
    assert Prefetch([tmp_path / "missing"]).wait(WAIT_S)
    (tmp_path / "empty").touch()
    assert Prefetch([tmp_path / "empty"]).wait(WAIT_S)


def test_nothing_more_is_read_once_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(b"w" * NUM_BYTES)
    begun, may_go = threading.Semaphore(0), threading.Event()
    num_begun = 0

    def held(fd: int, views: list[memoryview], at: int, flags: int = 0) -> int:
        nonlocal num_begun
        if flags:
            raise BlockingIOError
        num_begun += 1
        begun.release()
        assert may_go.wait(WAIT_S)
        return len(views[0])

    monkeypatch.setattr(os, "preadv", held)
    ahead = Prefetch([tmp_path / "weights"] * 5)
    for _ in range(NUM_THREADS):
        assert begun.acquire(timeout=WAIT_S)
    ahead.close()
    ahead.close()
    may_go.set()
    assert ahead.wait(WAIT_S)
    assert num_begun == NUM_THREADS
