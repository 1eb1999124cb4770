"""Numba kernels on torch's tensors and streams, at little cost per launch.

Owns what can be made once: views of tensors, streams, configured launches. Knows no kernel. In
Numba's simulator the tensors are the CPU's.
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

NUM_KEPT = 512  # views and configurations that one Launcher keeps


def can_launch() -> bool:
    """Whether Numba can compile and launch kernels here: a driver and a compiler were found, or
    its simulator was asked for.
    """
    try:
        from numba import cuda
    except ImportError:
        return False
    return bool(cuda.is_available())


class CudaLauncher:
    """Launches on torch's current stream of one device; may be captured in a CUDA graph once the
    kernel has been compiled, which its first launch does.
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
        """The contiguous tensor's bytes as items of `typestr` ("<u2": 16 bits), for a kernel.

        No copy and no lasting claim: a view is found by address, so the tensor must live until
        the launch, as on torch's own streams.
        """
        if self._simulated:
            return tensor.view(torch.uint8).numpy().view(typestr)
        return self._device_view(
            tensor.data_ptr(), tensor.shape, tensor.element_size(), typestr, self._device
        )

    def memory(self, address: int, num_bytes: int, typestr: str) -> Any:
        """Memory of the host as items of `typestr`, for a kernel that reads or writes it in place:
        where a kernel does so, it must be there, and registered with the driver of a device.
        """
        if self._simulated:
            count = num_bytes // int(typestr[2:])
            from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

            items = np.ctypeslib.as_ctypes_type(np.dtype(typestr)) * count
            return FakeCUDAArray(np.ctypeslib.as_array(items.from_address(address)))
        return _device_view(address, torch.Size([num_bytes]), 1, typestr, self._device)

    def launch(self, kernel: Any, grid: Grid, block: int, *args: Any) -> None:
        """Queue `kernel` with `block` threads in each block of `grid`; nobody waits."""
        if self._simulated:
            kernel[grid, block](*args)
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device):
            self._configured(kernel, grid, block, stream)(*args)


class _Described:
    """Device memory, in words that Numba understands; owns nothing."""

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

    with warnings.catch_warnings():  # of small grids, as those of a decode step must be
        warnings.filterwarnings("ignore", ".*will likely result in GPU under-utilization")
        configured: Callable[..., None] = kernel[grid, block, cuda.external_stream(stream)]
    return configured
