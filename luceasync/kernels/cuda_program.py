"""CUDA C++ programs, for kernels that must control when memory is requested and waited for.
Compiled by NVRTC, which torch's builds for NVIDIA GPUs include.

Owns compiled functions, by device and constants. Does not know any kernel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

from luceasync.kernels.kernel import compiled_aside
from luceasync.kernels.overlap import can_overlap

Constants = Mapping[str, int]
Key = tuple[int, tuple[tuple[str, int], ...], int]  # device, constants, bytes of shared memory

PATIENCE_S = 300.0  # another thread may compile the same function
_TYPES: dict[type, Any] = {int: ctypes.c_int, float: ctypes.c_float}  # others are addresses


class CompileError(Exception):
    """NVRTC failed to compile a program; has its log."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """`num_programs` (thread blocks) of `num_threads`, each with `shared_bytes` of dynamic shared
    memory. `cluster` neighbours form a thread block cluster, which GPUs from Hopper on support.
    """

    num_programs: int
    num_threads: int
    shared_bytes: int = 0
    cluster: int = 1


class CudaProgram:
    """One kernel function of a source file."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._loaded: dict[Key, Future[Any]] = {}
        self._asked: set[Key] = set()  # before the first launch
        self._lock = threading.Lock()

    def launch(
        self,
        device: torch.device,
        constants: Constants,
        wanted: LaunchShape,
        arguments: Sequence[Tensor | int | float | None],
    ) -> None:
        """Queue the kernel on torch's current stream of `device`; numbers are 32-bit. The first
        launch with these constants compiles, and must not be captured. If the device supports it,
        the kernel starts while the preceding one still runs. Raises CompileError."""
        key = device.index or 0, tuple(sorted(constants.items())), wanted.shared_bytes
        is_new = key not in self._asked  # looked up in every layer of a step
        if compiled_aside(self._name, partial(self._function, key) if is_new else None):
            self._asked.add(key)
            return
        driver, config = _driver(), _driver().CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = wanted.num_programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = wanted.num_threads, 1, 1
        config.sharedMemBytes = wanted.shared_bytes
        config.hStream = torch.cuda.current_stream(device).cuda_stream
        config.attrs = _attributes(wanted, can_overlap(key[0]))
        config.numAttrs = len(config.attrs)
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments)
        types = tuple(_TYPES.get(type(a), ctypes.c_void_p) for a in arguments)
        with _context(key[0]):
            _checked(driver.cuLaunchKernelEx(config, self._function(key), (values, types), 0))

    def _function(self, key: Key) -> Any:
        """The loaded function; the first caller loads it."""
        with self._lock:
            future = self._loaded.get(key)
            if is_first := future is None:
                future = self._loaded[key] = Future()
        assert future is not None
        if is_first:
            try:
                future.set_result(self._load(key))
            except BaseException as error:
                with self._lock:
                    del self._loaded[key]  # a later caller may succeed
                future.set_exception(error)
        try:
            return future.result(PATIENCE_S)
        except TimeoutError:
            message = (
                f"{self._path.name}: another thread compiles it for more than {PATIENCE_S:.0f} s"
            )
            raise CompileError(message) from None

    def _load(self, key: Key) -> Any:
        index, constants, shared_bytes = key
        capability = torch.cuda.get_device_capability(index)
        binary = compiled(self._path, dict(constants), capability)
        driver = _driver()
        with _context(index):
            module = _checked(driver.cuModuleLoadData(binary))
            function = _checked(driver.cuModuleGetFunction(module, self._name.encode()))
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
        return function


def _attributes(wanted: LaunchShape, overlaps: bool) -> list[Any]:
    driver, found = _driver(), []
    kinds = driver.CUlaunchAttributeID
    if overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        found.append(attribute)
    if wanted.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = wanted.cluster, 1, 1
        found.append(attribute)
    return found


def compiled(path: Path, constants: Constants, capability: tuple[int, int]) -> bytes:
    """The machine code of a source file for GPUs of `capability`, cached beside that of Triton.
    Raises CompileError.
    """
    from cuda.bindings import nvrtc

    source = path.read_bytes()
    headers = {each.name.encode(): each.read_bytes() for each in sorted(path.parent.glob("*.cuh"))}
    options = [b"--std=c++17", b"-arch=sm_%d%d" % capability]
    options += [f"-D{name}={value}".encode() for name, value in sorted(constants.items())]
    version = _checked(nvrtc.nvrtcVersion())
    digest = hashlib.sha256(repr((source, headers, options, version)).encode()).hexdigest()
    kept, name = get_cache_manager(digest), f"{path.stem}.cubin"
    if (found := kept.get_file(name)) is not None:
        return Path(found).read_bytes()
    included = len(headers), list(headers.values()), list(headers)
    program = _checked(nvrtc.nvrtcCreateProgram(source, path.name.encode(), *included))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            words = log.decode(errors="replace").rstrip("\0").strip()
            raise CompileError(f"{path.name} for sm_{capability[0]}{capability[1]}: {words}")
        binary = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    kept.put(bytes(binary), name, binary=True)
    return bytes(binary)


@functools.cache
def can_compile(device_index: int) -> bool:
    """Whether programs can run on the device: an NVIDIA GPU, Ampere or later, that NVRTC
    supports."""
    if torch.version.hip is not None:
        return False
    major, minor = torch.cuda.get_device_capability(device_index)
    try:
        from cuda.bindings import nvrtc

        known = _checked(nvrtc.nvrtcGetSupportedArchs())
    except (ImportError, RuntimeError):  # no bindings, or no library for them
        return False
    return major >= 8 and 10 * major + minor in known


@contextmanager
def _context(device_index: int) -> Iterator[None]:
    """Make the device's primary context, which torch also uses, current in this thread."""
    driver = _driver()
    _checked(driver.cuCtxPushCurrent(_primary_context(device_index)))
    try:
        yield
    finally:
        _checked(driver.cuCtxPopCurrent())


@functools.cache
def _primary_context(device_index: int) -> Any:
    driver = _driver()
    _checked(driver.cuInit(0))
    return _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device_index))))


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _checked(answer: tuple[Any, ...]) -> Any:
    """The results of a call without its error code. Raises if that is an error."""
    error, *found = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA: {error!r}")
    return found[0] if len(found) == 1 else tuple(found) if found else None
