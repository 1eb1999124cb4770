"""How things are done on one device: one object for each, whatever the vendor.

Whoever has a device's name opens its platform here and asks it; nobody else asks what kind of
device there is. What a device offers is plain data: luceasync.pipeline.offer.
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
from luceasync.models.ops import Ops
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.gpu_platform import CudaPlatform, HipPlatform, gpu_backend
from luceasync.pipeline.offer import Offer

T = TypeVar("T")


class Event(Protocol):
    """A moment in the work that a device has been given."""

    def query(self) -> bool:
        """Whether it has come that far."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class Stopwatch(Protocol):
    """Measures how long a device works."""

    def stop(self) -> None:
        """With the end of what was queued so far, on the current stream."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the device has come to where it was stopped."""
        ...

    def seconds(self) -> float:
        """What it shows. It is waited for."""
        ...


class Platform(Protocol):
    """One device of this process. Objects of the same name are interchangeable."""

    @property
    def name(self) -> str:
        """As the user knows it: "cpu:0", "hip:1"."""
        ...

    @property
    def device(self) -> torch.device:
        """As torch knows it."""
        ...

    @property
    def ops(self) -> Ops:
        """What layers are made of."""
        ...

    def offer(self, share: int = 1) -> Offer:
        """What it offers now; `share`: among how many devices its memory is divided."""
        ...

    def pick(
        self,
        *,
        torch: Callable[[], T],
        triton: Callable[[], T] | None = None,
        numba: Callable[[], T] | None = None,
    ) -> T:
        """What the device runs best of that which is at hand; only that is made, so that makers
        can import what others lack.
        """
        ...

    def passes(self, *, eager: Callable[[], T], captured: Callable[[Capture], T]) -> T:
        """Passes as the device runs them best: operation by operation, or captured as graphs."""
        ...

    def warm_up(self, work: Callable[[], None], num_times: int) -> None:
        """Do `work` now where kernels are compiled when they are first used: once to compile them
        beside each other, none of them launched, and then `num_times`.
        """
        ...

    def touch(self, work: Callable[[], None]) -> None:
        """Do `work`, which writes memory that is new, where the first write is the slow one."""
        ...

    def blank(self, rows: Tensor) -> None:
        """Clear rows that are about to be written, where decode steps read whole pages: what is
        not written yet gets no weight, which undoes any value but NaN.
        """
        ...

    def staging(self, cache: LaneCache) -> Staging:
        """Blocks of rows that are not all on the device."""
        ...

    def beside(self, *used: Tensor) -> AbstractContextManager[object]:
        """Inside it work is queued behind all that was queued so far, and what is queued outside
        goes on beside it. Tensors from outside that it has `used` keep their memory until that is
        over, whoever lets them go before.
        """
        ...

    def join_beside(self) -> None:
        """What is queued outside from here on comes behind all that was queued inside so far."""
        ...

    def stopwatch(self) -> Stopwatch:
        """Runs from what was queued so far on, on the current stream."""
        ...

    def copies(self, cache: LaneCache) -> LaneCopies:
        """Copies between lanes on the device and host memory."""
        ...

    def node_memory(
        self,
        capacity_bytes: int,
        *,
        warm_bytes: int,
        quiet: threading.Event | None,
        lanes_bytes: int,
    ) -> HostMemory:
        """Host memory that the device copies from and to; see luceasync.pipeline.devices."""
        ...

    def on_device(self) -> AbstractContextManager[object]:
        """Inside it kernels are launched on this device."""
        ...

    def synchronize(self) -> None:
        """Wait until what was queued so far, on the current stream, is done."""
        ...

    def record_event(self) -> Event:
        """The end of what was queued so far, on the current stream."""
        ...

    def empty_cache(self) -> None:
        """Give memory back that is kept for later but in nobody's use."""
        ...


def open_platform(name: str) -> Platform:
    """The platform of the device `name`, "cuda:0", which must be there."""
    backend = name.partition(":")[0]
    if backend == "cpu":
        return CpuPlatform(name)
    assert backend == gpu_backend(), f"{name}, but this process has {gpu_backend()}"
    return HipPlatform(name) if backend == "hip" else CudaPlatform(name)
