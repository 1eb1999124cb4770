"""Numba kernels on torch's tensors and streams, with little overhead per launch.

Caches views of tensors, streams and configured launches. Does not know any kernel. In Numba's
simulator, tensors are on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Grid = tuple[int, int, int]

NUM_KEPT = 512  # views, and configurations, that one launcher caches


def can_launch() -> bool:
    """Whether Numba can compile and launch kernels here: with a driver and a compiler, or in its
    simulator.
    """
    try:
        from numba import cuda
    except ImportError:
        return False
    return bool(cuda.is_available())


class CudaLauncher:
    """Launches on torch's current stream of one device. A launch may be captured in a CUDA graph
    once the kernel is compiled, which its first launch does.
    """

    def __init__(self, device: torch.device) -> None:
        from numba import config

        self._device = device
        self._simulated = bool(config.ENABLE_CUDASIM)
        if device.type != "cuda" and not self._simulated:
            raise ValueError(f"kernels for {device}: a CUDA device is expected")
        self._device_view = lru_cache(NUM_KEPT)(_device_view)
        self._configured = lru_cache(NUM_KEPT)(_configured)

    def view(self, tensor: Tensor, typestr: str) -> Any:
        """A kernel's view of a contiguous tensor, with items of `typestr` ("<u2": 16 bits).

        It neither copies nor owns the memory, and is cached by address: the tensor must live until
        the launch, as with torch's own streams.
        """
        if self._simulated:
            return tensor.view(torch.uint8).numpy().view(typestr)
        return self._device_view(
            tensor.data_ptr(), tensor.shape, tensor.element_size(), typestr, self._device
        )

    def memory(self, address: int, num_bytes: int, typestr: str) -> Any:
        """A kernel's view of host memory in place, with items of `typestr`. What the kernel
        accesses must be mapped, and registered with the device's driver.
        """
        if self._simulated:
            count = num_bytes // int(typestr[2:])
            from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

            items = np.ctypeslib.as_ctypes_type(np.dtype(typestr)) * count
            return FakeCUDAArray(np.ctypeslib.as_array(items.from_address(address)))
        return _device_view(address, torch.Size([num_bytes]), 1, typestr, self._device)

    def launch(self, kernel: Any, grid: Grid, block: int, *args: Any) -> None:
        """Queue `kernel` with `block` threads in each block of `grid`, without waiting."""
        if self._simulated:
            kernel[grid, block](*args)
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device):
            self._configured(kernel, grid, block, stream)(*args)


class _Described:
    """Describes device memory to Numba; owns nothing."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "strides": None,
            "typestr": typestr,
        }


def _device_view(
    address: int, shape: torch.Size, item_bytes: int, typestr: str, device: torch.device
) -> Any:
    from numba import cuda

    words = (*shape[:-1], shape[-1] * item_bytes // int(typestr[2:]))
    with torch.cuda.device(device):
        return cuda.as_cuda_array(_Described(address, words, typestr))


def _configured(kernel: Any, grid: Grid, block: int, stream: int) -> Callable[..., None]:
    from numba import cuda

    with warnings.catch_warnings():  # about small grids, which a decode step cannot avoid
        warnings.filterwarnings("ignore", ".*will likely result in GPU under-utilization")
        configured: Callable[..., None] = kernel[grid, block, cuda.external_stream(stream)]
    return configured
