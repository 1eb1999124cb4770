"""Weights are read ahead into the page cache, if they are not there, and a driver is started."""

import importlib
import os
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from luceasync.cli import ahead as module
from luceasync.cli.ahead import (
    CUDA_DRIVER,
    NUM_THREADS,
    PROBE_BYTES,
    SHAPES_FOR_THE_COMPILER,
    Prefetch,
    start_driver,
    without_compiler,
)
from luceasync.config import PlacementConfig

WAIT_S = 30.0
PIECE_BYTES = 4 << 20
NUM_BYTES = 3 * PIECE_BYTES + 5000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of which a small file has several, each read in three parts."""
    monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(module, "BUFFER_BYTES", PIECE_BYTES // 3)


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
            found.append(sum(map(len, views)))
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
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
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
        return sum(map(len, views))

    monkeypatch.setattr(os, "preadv", held)
    ahead = Prefetch([tmp_path / "weights"] * 5)
    for _ in range(NUM_THREADS):
        assert begun.acquire(timeout=WAIT_S)
    ahead.close()
    ahead.close()
    may_go.set()
    assert ahead.wait(WAIT_S)
    assert num_begun == NUM_THREADS


class Driver:
    """Stands for NVIDIA's driver: notes the devices whose contexts are made."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def cuInit(self, flags: int) -> int:
        self.calls.append("init")
        return 0

    def cuDeviceGet(self, device: object, index: int) -> int:
        self.calls.append(f"device {index}")
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, device: object) -> int:
        self.calls.append("context")
        return 0


@pytest.mark.parametrize(
    ("placement", "indices"),
    [
        (PlacementConfig(), [0]),
        (PlacementConfig(device="cuda:2"), [2]),
        (PlacementConfig(devices=("cuda:1", "cpu", "cuda:3")), [1, 3]),
        (PlacementConfig(devices=("cuda:1", "cuda:3"), ipc="always"), [1]),
        (PlacementConfig(devices=("box2/cuda:1", "cuda:0")), [0]),
    ],
)
def test_the_contexts_of_the_devices_of_this_process_are_made_ahead(
    placement: PlacementConfig, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(module.ctypes, "CDLL", {CUDA_DRIVER: driver}.get)
    thread = start_driver(placement)
    assert thread is not None
    thread.join(WAIT_S)
    made = [call for index in indices for call in (f"device {index}", "context")]
    assert driver.calls == ["init", *made]


def test_no_driver_is_started_for_a_cpu() -> None:
    assert start_driver(PlacementConfig(device="cpu")) is None


def test_a_machine_without_a_driver_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    thread = start_driver(PlacementConfig())
    assert thread is not None
    thread.join(WAIT_S)


def test_torch_is_imported_without_what_its_compiler_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, torch.__name__)
    monkeypatch.delitem(sys.modules, SHAPES_FOR_THE_COMPILER)
    with without_compiler():
        empty = importlib.import_module(SHAPES_FOR_THE_COMPILER)
    assert not hasattr(empty, "meta_index_Tensor")
    assert SHAPES_FOR_THE_COMPILER not in sys.modules


def test_a_torch_that_is_there_keeps_it() -> None:
    before = sys.modules[SHAPES_FOR_THE_COMPILER]
    with without_compiler():
        assert importlib.import_module(SHAPES_FOR_THE_COMPILER) is before
    assert sys.modules[SHAPES_FOR_THE_COMPILER] is before
