"""The GPUs' bodies of luceasync.pipeline.platform.Platform: work is queued on streams, and the host
goes on.

Triton comes with torch's GPU builds only, so what needs it is imported when it is asked for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from luceasync.cuda.launch import can_launch
from luceasync.host_cache.arena import SPARE_BYTES, Arena, DevicePageLock, HostMemory, PlainMemory
from luceasync.host_cache.gpu_copies import StreamCopies, kernel_page_copies, torch_page_copies
from luceasync.host_cache.staging import StreamStaging
from luceasync.kv.cache import LaneCache
from luceasync.models.ops import Ops
from luceasync.pipeline.capture import Capture, compiled_ahead
from luceasync.pipeline.offer import NUM_STAGED_STATES, Offer, offer_of

T = TypeVar("T")

log = logging.getLogger(__name__)


class CudaPlatform:
    """A GPU of NVIDIA's; see Platform."""

    def __init__(self, name: str) -> None:
        self.name = name
        # torch calls HIP devices "cuda" too.
        self.device = torch.device("cuda", int(name.partition(":")[2]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @cached_property
    def ops(self) -> Ops:
        """The fused kernels; see Platform."""
        from luceasync.models.triton_ops import TritonOps

        return TritonOps()

    def offer(self, share: int = 1) -> Offer:
        with self.on_device():
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        free_bytes, _ = torch.cuda.mem_get_info(self.device.index)
        return offer_of(self.name, free_bytes // share, ("bf16", "fp32") if has_bf16 else ("fp32",))

    def pick(
        self,
        *,
        torch: Callable[[], T],
        triton: Callable[[], T] | None = None,
        numba: Callable[[], T] | None = None,
    ) -> T:
        if triton is not None:
            return triton()
        return numba() if numba is not None and can_launch() else torch()

    def passes(self, *, eager: Callable[[], T], captured: Callable[[Capture], T]) -> T:
        return captured(Capture(self.device))

    def warm_up(self, work: Callable[[], None], num_times: int) -> None:
        with self.on_device(), compiled_ahead(self.device):
            work()
        for _ in range(num_times):
            work()

    def touch(self, work: Callable[[], None]) -> None:
        """The memory is there."""

    def blank(self, rows: Tensor) -> None:
        """Kernels read no row that is not written."""

    def staging(self, cache: LaneCache) -> StreamStaging:
        return StreamStaging(cache)

    @contextmanager
    def beside(self, *used: Tensor) -> Iterator[None]:
        for tensor in used:
            tensor.record_stream(self._beside)
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._beside):
            yield

    def join_beside(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._beside)

    def stopwatch(self) -> EventWatch:
        return EventWatch(torch.cuda.current_stream(self.device))

    @cached_property
    def _beside(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def copies(self, cache: LaneCache) -> StreamCopies:
        paging = self.pick(torch=torch_page_copies, numba=lambda: kernel_page_copies(self.device))
        return StreamCopies(cache, NUM_STAGED_STATES, paging)

    def node_memory(
        self,
        capacity_bytes: int,
        *,
        warm_bytes: int,
        quiet: threading.Event | None,
        lanes_bytes: int,
    ) -> HostMemory:
        # Half of the spare memory may be used before there is more: every lane can still be saved.
        spare_bytes = max(SPARE_BYTES, 2 * lanes_bytes)
        try:
            pages = DevicePageLock(self.device)
            return Arena(capacity_bytes, pages, quiet=quiet, spare_bytes=spare_bytes)
        except MemoryError as error:
            log.warning("the prefix cache is slower, in memory that is not pinned: %s", error)
            return PlainMemory()

    def on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device.index)  # a number is taken as it is

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def record_event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def empty_cache(self) -> None:
        """Of all GPUs; see Platform."""
        torch.cuda.empty_cache()


class HipPlatform(CudaPlatform):
    """A GPU of AMD's, by way of ROCm: as NVIDIA's, but Numba does not compile for it."""

    def pick(
        self,
        *,
        torch: Callable[[], T],
        triton: Callable[[], T] | None = None,
        numba: Callable[[], T] | None = None,
    ) -> T:
        return torch() if triton is None else triton()


class EventWatch:
    """A Stopwatch by a GPU's own events."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record(stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    @property
    def is_over(self) -> bool:
        return bool(self._end.query())

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


RUN_ON = ("H100", "H200")  # words of products that we have measured on
# Kinds of GPU that tests compile every kernel for.
COMPILED_FOR_NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
COMPILED_FOR = (*COMPILED_FOR_NVIDIA, "gfx942", "gfx1100", "gfx1201")


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """A GPU of this machine, for a person: its name here, "cuda:0", and its maker's. `kind`: what
    kernels are compiled for, "sm_90".
    """

    name: str
    product: str
    kind: str
    free_bytes: int
    total_bytes: int

    @property
    def caution(self) -> str:
        """What is not known of it; "" where we have measured on one."""
        if any(word in self.product for word in RUN_ON):
            return ""
        if self.kind in COMPILED_FOR:
            return f"nobody has run luceasync on one yet; its kernels are tested to fit {self.kind}"
        return f"nobody has run luceasync on one yet, nor compiled its kernels for {self.kind}"


def gpu_backend() -> str | None:
    """What this torch build computes with where a GPU is there: "cuda", "hip" or None."""
    if not torch.cuda.is_available():
        return None
    return "hip" if torch.version.hip else "cuda"


def torch_build() -> str:
    """What this torch was built for, in words."""
    return torch.version.cuda or torch.version.hip or "CPU only"


def num_gpus() -> int:
    """How many GPUs there are."""
    return torch.cuda.device_count()


def found_gpus() -> list[FoundGpu]:
    """All GPUs of this machine."""
    return [
        FoundGpu(
            f"{gpu_backend()}:{index}",
            torch.cuda.get_device_name(index),
            _kind(index),
            *torch.cuda.mem_get_info(index),
        )
        for index in range(torch.cuda.device_count())
    ]


def _kind(index: int) -> str:
    """What kernels are compiled for."""
    if torch.version.hip:
        arch: str = torch.cuda.get_device_properties(index).gcnArchName
        return arch.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))
