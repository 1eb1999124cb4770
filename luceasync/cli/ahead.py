"""Makes a start shorter: while Python is importing torch, weights are read into the page cache and
a GPU's driver is started; and what of torch only its compiler needs is not imported.

Owns the threads that do it. They are not waited for, and whatever they fail to do is done later.
Imports no torch.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import psutil

from luceasync.config import Config, PlacementConfig
from luceasync.models.files import ModelFiles
from luceasync.pipeline.shard_plan import named_devices
from luceasync.speculation.dflash.draft_files import DraftFiles

log = logging.getLogger(__name__)

CUDA_DRIVER = "libcuda.so.1"
CUDA, DEFAULT_DEVICE = "cuda:", "cuda:0"

# Shapes of results, which torch's compiler asks for: registering them for each operator takes a
# quarter of the time of `import torch`.
SHAPES_FOR_THE_COMPILER = "torch._meta_registrations"

NUM_THREADS = 4
# One call reads a piece into the same buffer again and again: after each call a thread waits up to
# 5 ms for the interpreter's lock, which the thread that imports holds.
PIECE_BYTES, BUFFER_BYTES = 64 << 20, 4 << 20
PROBE_BYTES = 4096  # at either end of a piece; the pages between them are usually in the same state
MEMORY_SHARE = 2  # the fraction of available memory that is filled, as its reciprocal


@contextmanager
def begun_ahead(config: Config, model: ModelFiles) -> Iterator[None]:
    """Read ahead the weights of `config`, which has been checked, within the context; `model` is
    its model. Also start the driver.
    """
    start_driver(config.placement)
    drafter = [] if config.drafter_dir is None else DraftFiles(config.drafter_dir).weight_files
    with ExitStack() as closing:
        closing.callback(Prefetch([*model.weights.paths, *drafter]).close)
        yield


@contextmanager
def without_compiler() -> Iterator[None]:
    """Leave out of an `import torch` within the context what only torch's compiler uses. It may be
    imported later, and must be before torch.compile.
    """
    if "torch" in sys.modules:
        yield
        return
    empty = sys.modules[SHAPES_FOR_THE_COMPILER] = ModuleType(SHAPES_FOR_THE_COMPILER)
    try:
        yield
    finally:
        if sys.modules.get(SHAPES_FOR_THE_COMPILER) is empty:
            del sys.modules[SHAPES_FOR_THE_COMPILER]


def hash_triton(placement: PlacementConfig) -> None:
    """Import torch, and start to hash Triton's files in a thread if this process will open a GPU:
    it then ends before the first kernel is needed.
    """
    from luceasync.pipeline.devices import has_backend

    indices = _nvidia_devices(placement)
    if indices and has_backend(f"{CUDA}{indices[0]}"):
        from luceasync.kernels.kernel import hash_ahead

        hash_ahead()


def start_driver(placement: PlacementConfig) -> threading.Thread | None:
    """Start NVIDIA's driver in a thread, with the contexts of the devices that this process will
    open; torch reuses both. Returns None, and does nothing, if there is no such driver or device.
    """
    indices = _nvidia_devices(placement)
    if not indices:
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before that
    thread = threading.Thread(target=_start_driver, args=[indices], name="driver", daemon=True)
    thread.start()
    return thread


def _nvidia_devices(placement: PlacementConfig) -> list[int]:
    """The numbers of NVIDIA's GPUs that this process may open."""
    names = named_devices(placement.device, placement.devices) or (DEFAULT_DEVICE,)
    here = names[:1] if placement.ipc == "always" else names
    return [int(name.removeprefix(CUDA)) for name in here if name.startswith(CUDA)]


def _start_driver(indices: Sequence[int]) -> None:
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return
    fault = driver.cuInit(0)
    for index in indices:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        fault = fault or driver.cuDeviceGet(ctypes.byref(device), index)
        fault = fault or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if fault:
        log.debug("the CUDA driver was not started ahead: error %d", fault)


class Prefetch:
    """Reads `paths` in threads until it is closed, up to half of the available memory. Skips what
    is already in the page cache. Stops at an error, which the actual reader will report.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._lock = threading.Lock()
        self._pieces = _pieces(paths, psutil.virtual_memory().available // MEMORY_SHARE)
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name="prefetch", daemon=True)  # a disk may hang
            for _ in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop reading, without waiting for reads in progress. Idempotent."""
        self._is_closed = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is read. Returns whether it is."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        try:
            while not self._is_closed and (piece := self._next()) is not None:
                path, begin, end = piece
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if not _is_cached(fd, begin, end):
                        _read(fd, begin, end, buffer)
                finally:
                    os.close(fd)
        except OSError as error:
            self.close()
            log.debug("weights are not read ahead: %s", error)

    def _next(self) -> tuple[Path, int, int] | None:
        with self._lock:
            return next(self._pieces, None)


def _pieces(paths: Sequence[Path], limit_bytes: int) -> Iterator[tuple[Path, int, int]]:
    """(path, begin, end) of all pieces of the files, up to a limit. Raises OSError."""
    for path in paths:
        num_bytes = min(path.stat().st_size, limit_bytes)
        limit_bytes -= num_bytes
        for begin in range(0, num_bytes, PIECE_BYTES):
            yield path, begin, min(begin + PIECE_BYTES, num_bytes)


def _read(fd: int, begin: int, end: int, buffer: memoryview) -> None:
    """Read bytes [begin, end), which are dropped, or as many as there are. Raises OSError."""
    while begin < end:
        num_whole, rest_bytes = divmod(end - begin, len(buffer))
        count = os.preadv(fd, [*[buffer] * num_whole, buffer[:rest_bytes]], begin)
        begin = begin + count if count else end


def _is_cached(fd: int, begin: int, end: int) -> bool:
    """Whether bytes [begin, end) seem to be in the page cache; False if the system does not report
    it.
    """
    probe = bytearray(PROBE_BYTES)
    try:
        return all(
            os.preadv(fd, [probe], at, os.RWF_NOWAIT) > 0
            for at in (begin, max(begin, end - PROBE_BYTES))
        )
    except OSError:
        return False
