"""The Platform of CPUs: work is done when a call returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from luceasync.errors import PlacementError
from luceasync.host_cache.arena import HostMemory, PlainMemory, WarmMemory
from luceasync.host_cache.copies import DirectCopies
from luceasync.host_cache.staging import DirectStaging
from luceasync.kv.cache import LaneCache
from luceasync.models.encodings import HostTransfer
from luceasync.models.ops import Ops, OpsWithSlots, TorchOps
from luceasync.models.packed_ops import PackedOps, can_pack, limit_product_caches
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.offer import Offer, offer_of

T = TypeVar("T")


class CpuPlatform:
    """A CPU. All CPU devices that a user names are the same device for torch."""

    def __init__(self, name: str = "cpu:0") -> None:
        self.name = name
        self.device = torch.device("cpu")
        limit_product_caches()

    def __repr__(self) -> str:
        return f"CpuPlatform({self.name!r})"

    @cached_property
    def ops(self) -> Ops:
        return PackedOps() if can_pack() else TorchOps()

    def slotted_ops(self, num_slots: int) -> OpsWithSlots:
        """Not supported: plans refuse slots on CPUs."""
        raise PlacementError(f"--expert-memory: {self.name} computes from host memory already")

    def offer(self, share: int = 1) -> Offer:
        has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        dtypes = ("bf16", "fp32") if has_bf16 else ("fp32",)
        return offer_of(self.name, psutil.virtual_memory().available // share, dtypes)

    def pick(
        self,
        *,
        torch: Callable[[], T],
        triton: Callable[[], T] | None = None,
        numba: Callable[[], T] | None = None,
    ) -> T:
        return torch()

    def passes(self, *, eager: Callable[[], T], captured: Callable[[Capture], T]) -> T:
        return eager()

    def warm_up(self, work: Callable[[], None], num_times: int) -> None:
        """Nothing to do: nothing is compiled."""

    def touch(self, work: Callable[[], None]) -> None:
        """Run `work`: the system provides pages at their first write."""
        work()

    def blank(self, rows: Tensor) -> None:
        rows.zero_()

    def staging(self, cache: LaneCache) -> DirectStaging:
        return DirectStaging(cache)

    def side_stream(self, *used: Tensor) -> AbstractContextManager[object]:
        """No-op: there are no streams."""
        return nullcontext()

    def join_side_stream(self) -> None:
        """No-op: the work is done."""

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch()

    def copies(self, cache: LaneCache) -> DirectCopies:
        return DirectCopies(cache)

    def load_ahead(self) -> None:
        """No-op: no kernel is compiled."""

    def num_layers_at_once(self, room_bytes: int) -> int:
        return 1

    def row_transfer(self) -> HostTransfer:
        return HostTransfer()

    def node_memory(
        self,
        capacity_bytes: int,
        *,
        warm_bytes: int,
        quiet: threading.Event | None,
        lanes_bytes: int,
    ) -> HostMemory:
        return WarmMemory(warm_bytes, capacity_bytes) if warm_bytes else PlainMemory()

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        """No-op: the work is done."""

    def record_event(self) -> CompletedEvent:
        return CompletedEvent()

    def empty_cache(self) -> None:
        """No-op: nothing is cached."""


class CompletedEvent:
    """An Event of work that is already done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """No-op: there is nothing to wait for."""


class HostStopwatch:
    """A Stopwatch for work that is done when a call returns."""

    is_over = True

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started

    def seconds(self) -> float:
        return self._seconds
