"""What differs between devices: one Platform for each device, of any vendor.

Code that has a device's name opens its platform here; nothing else depends on the kind of a device.
What a device offers is plain data: see luceasync.pipeline.offer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copies import LaneCopies
from luceasync.host_cache.staging import Staging
from luceasync.kv.cache import LaneCache
from luceasync.models.encodings import RowTransfer
from luceasync.models.ops import Ops, OpsWithSlots
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.gpu_platform import CudaPlatform, HipPlatform, gpu_backend
from luceasync.pipeline.offer import Offer

T = TypeVar("T")


class Event(Protocol):
    """A point in a device's queued work."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached it."""
        ...


class Stopwatch(Protocol):
    """Measures the time that queued work takes on a device."""

    def stop(self) -> None:
        """Stop at the end of the work queued so far on the current stream."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the device has reached the point where it was stopped."""
        ...

    def seconds(self) -> float:
        """The measured time; waits for it."""
        ...


class Platform(Protocol):
    """One device of this process. Objects of the same name are interchangeable."""

    @property
    def name(self) -> str:
        """The user's name for it, like "cpu:0" or "hip:1"."""
        ...

    @property
    def device(self) -> torch.device:
        """torch's name for it."""
        ...

    @property
    def ops(self) -> Ops:
        """The operations that layers are made of."""
        ...

    def slotted_ops(self, num_slots: int) -> OpsWithSlots:
        """`ops` with `num_slots` slots for the experts of each layer, which stay in host memory."""
        ...

    def offer(self, share: int = 1) -> Offer:
        """What it offers now, with its free memory divided among `share` devices."""
        ...

    def pick(
        self,
        *,
        torch: Callable[[], T],
        triton: Callable[[], T] | None = None,
        numba: Callable[[], T] | None = None,
    ) -> T:
        """Make the fastest implementation that runs here. The others are not called, so they may
        import what this machine lacks."""
        ...

    def passes(self, *, eager: Callable[[], T], captured: Callable[[Capture], T]) -> T:
        """Make the object that runs passes: operation by operation, or captured as graphs."""
        ...

    def warm_up(self, work: Callable[[], None], num_times: int) -> None:
        """Run `work` where kernels are compiled at first use: once to compile them in parallel,
        without launching any, then `num_times`.
        """
        ...

    def touch(self, work: Callable[[], None]) -> None:
        """Run `work`, which writes to new memory, where the first write to a page is slow."""
        ...

    def blank(self, rows: Tensor) -> None:
        """Clear rows before they are written, where decode steps read whole pages: rows not written
        yet get weight 0, which undoes any value but NaN.
        """
        ...

    def staging(self, cache: LaneCache) -> Staging:
        """Streams blocks of rows, some of which are not on the device."""
        ...

    def side_stream(self, *used: Tensor) -> AbstractContextManager[object]:
        """Queue work inside the context on a side stream, behind all work queued so far and
        parallel to what is queued outside. Tensors from outside that it uses, passed in `used`,
        keep their memory until it is done.
        """
        ...

    def join_side_stream(self) -> None:
        """Order work queued from now on behind all work on the side stream."""
        ...

    def stopwatch(self) -> Stopwatch:
        """Start measuring at the end of the work queued so far on the current stream."""
        ...

    def copies(self, cache: LaneCache) -> LaneCopies:
        """Copies between lanes on the device and host memory."""
        ...

    def load_ahead(self) -> None:
        """Start, in threads, the work for which loading a model will wait. May be called again."""
        ...

    def num_layers_at_once(self, room_bytes: int) -> int:
        """How many layers to read at once, each with a transfer of its own. `room_bytes`: memory
        that is free until the weights are read.
        """
        ...

    def row_transfer(self) -> RowTransfer:
        """Transfers stored weights to the device."""
        ...

    def node_memory(
        self,
        capacity_bytes: int,
        *,
        warm_bytes: int,
        quiet: threading.Event | None,
        lanes_bytes: int,
    ) -> HostMemory:
        """Host memory for copies from and to the device, see devices.host_memory."""
        ...

    def on_device(self) -> AbstractContextManager[object]:
        """Context in which kernels are launched on this device."""
        ...

    def synchronize(self) -> None:
        """Wait for all work queued on the current stream."""
        ...

    def record_event(self) -> Event:
        """An event at the end of the work queued on the current stream."""
        ...

    def empty_cache(self) -> None:
        """Return unused cached memory to the system."""
        ...


def open_platform(name: str) -> Platform:
    """The platform of device `name`, like "cuda:0", which must exist."""
    backend = name.partition(":")[0]
    if backend == "cpu":
        return CpuPlatform(name)
    assert backend == gpu_backend(), f"{name}, but this process has {gpu_backend()}"
    return HipPlatform(name) if backend == "hip" else CudaPlatform(name)
