"""Platforms of GPUs: work is queued on streams while the host goes on. Also: the GPUs of this
machine.

Triton comes with torch's GPU builds only, so what needs it is imported on use.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from luceasync.cuda.launch import can_launch
from luceasync.errors import ModelError
from luceasync.host_cache.arena import (
    SPARE_BYTES,
    Arena,
    DevicePageLock,
    HostMemory,
    LockedAhead,
    PlainMemory,
)
from luceasync.host_cache.gpu_copies import (
    PageCopies,
    StreamCopies,
    kernel_page_copies,
    made_on_use,
    torch_page_copies,
)
from luceasync.host_cache.staging import StreamStaging
from luceasync.kv.cache import LaneCache
from luceasync.models.encodings import StoredRows
from luceasync.models.ops import Ops, OpsWithSlots
from luceasync.pipeline.capture import Capture, compiled_ahead
from luceasync.pipeline.offer import NUM_STAGED_STATES, Offer, offer_of

T = TypeVar("T")

# While one layer waits for the file or the bus, others are unpacked.
NUM_LAYERS_AT_ONCE = 4
# Of weights in transit, for each of these layers: one thread copies cached files at 4 GB/s at most.
NUM_READERS = 4
READ_BYTES, MIN_READ_BYTES = 8 << 20, 4 << 20  # each part costs 0.1 ms of interpreter time
NUM_COPIED = 2  # buffers: the bus is faster than the readers
SLICE_BYTES, NUM_SLICES = 32 << 20, 3
# What reading a layer takes on the device beside its weights: slices, and one being unpacked.
TRANSIT_BYTES = 2 * NUM_SLICES * SLICE_BYTES

log = logging.getLogger(__name__)


class CudaPlatform:
    """A GPU from NVIDIA."""

    def __init__(self, name: str) -> None:
        self.name = name
        # torch calls HIP devices "cuda" too.
        self.device = torch.device("cuda", int(name.partition(":")[2]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @cached_property
    def ops(self) -> Ops:
        """Operations made of fused kernels."""
        from luceasync.models.triton_ops import TritonOps

        self.load_ahead()
        return TritonOps()

    def load_ahead(self) -> None:
        from luceasync.kernels.kernel import hash_ahead

        hash_ahead()

    def slotted_ops(self, num_slots: int) -> OpsWithSlots:
        from luceasync.models.expert_slots import SlottedOps

        return SlottedOps(num_slots, PinnedHost(self))

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
        """No-op: device memory exists once it is allocated."""

    def blank(self, rows: Tensor) -> None:
        """No-op: kernels read only rows that were written."""

    def staging(self, cache: LaneCache) -> StreamStaging:
        return StreamStaging(cache)

    @contextmanager
    def side_stream(self, *used: Tensor) -> Iterator[None]:
        for tensor in used:
            tensor.record_stream(self._side_stream)
        self._side_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side_stream):
            yield

    def join_side_stream(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._side_stream)

    def stopwatch(self) -> EventWatch:
        return EventWatch(torch.cuda.current_stream(self.device))

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def copies(self, cache: LaneCache) -> StreamCopies:
        def paging() -> PageCopies:
            return self.pick(torch=torch_page_copies, numba=lambda: kernel_page_copies(self.device))

        return StreamCopies(cache, NUM_STAGED_STATES, made_on_use(paging))

    def num_layers_at_once(self, room_bytes: int) -> int:
        return max(1, min(NUM_LAYERS_AT_ONCE, room_bytes // TRANSIT_BYTES))

    def row_transfer(self) -> PinnedTransfer:
        return PinnedTransfer(self.device)

    def node_memory(
        self,
        capacity_bytes: int,
        *,
        warm_bytes: int,
        quiet: threading.Event | None,
        lanes_bytes: int,
    ) -> HostMemory:
        # More memory is pinned once half of the spare memory is used; all lanes fit in that half.
        spare_bytes = max(SPARE_BYTES, 2 * lanes_bytes)
        try:
            pages = DevicePageLock(self.device)
            return Arena(capacity_bytes, pages, quiet=quiet, spare_bytes=spare_bytes)
        except MemoryError as error:
            log.warning("host memory cannot be pinned, copies will be slower: %s", error)
            return PlainMemory()

    def on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device.index)  # an index is the cheapest argument

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def record_event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def empty_cache(self) -> None:
        """Return unused cached memory of all GPUs."""
        torch.cuda.empty_cache()


class HipPlatform(CudaPlatform):
    """A GPU from AMD through ROCm: like NVIDIA's, except that Numba does not compile for it."""

    def pick(
        self,
        *,
        torch: Callable[[], T],
        triton: Callable[[], T] | None = None,
        numba: Callable[[], T] | None = None,
    ) -> T:
        return torch() if triton is None else triton()


@dataclass(frozen=True, slots=True)
class _PinnedBuffer:
    """Pinned memory into which a thread reads; free once `copied` has happened."""

    memory: Tensor
    copied: torch.cuda.Event


def _pinned_buffer(num_bytes: int) -> _PinnedBuffer:
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=num_bytes > 0)
    return _PinnedBuffer(memory, torch.cuda.Event())


@dataclass(frozen=True, slots=True)
class _Slice:
    """Device memory for rows in transit; it may be overwritten after `unpacked`."""

    memory: Tensor
    unpacked: torch.cuda.Event


class PinnedTransfer:
    """A RowTransfer through pinned buffers, on a stream of its own.

        readers   read | read | read       each a few MB, then queue the copy of them
        stream         copy | copy | copy  into slices of device memory, used in turn
        caller               unpack        queued on the current stream

    Files, the bus and the device are busy at once, and the caller's thread has little to do.
    """

    is_on_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._slices = [self._slice(SLICE_BYTES) for _ in range(NUM_SLICES)]
        self._num_begun = 0
        self._buffers: SimpleQueue[_PinnedBuffer] = SimpleQueue()
        # Buffers being read into, and buffers being copied.
        for _ in range(NUM_READERS + NUM_COPIED):
            self._buffers.put(_pinned_buffer(0))
        self._readers = ThreadPoolExecutor(NUM_READERS, "read-weights")

    def pieces(self, rows: StoredRows) -> Iterator[Tensor]:
        step = max(1, SLICE_BYTES // rows.row_bytes)
        begins = deque(range(0, len(rows), step))
        coming: deque[tuple[_Slice, Tensor, list[Future[None]]]] = deque()
        try:
            while begins or coming:
                while begins and len(coming) < NUM_SLICES - 1:
                    begin = begins.popleft()
                    coming.append(self._begin(rows, begin, min(begin + step, len(rows))))
                used, piece, reading = coming[0]
                for each in reading:
                    each.result()
                coming.popleft()
                current = torch.cuda.current_stream(self._device)
                current.wait_stream(self._stream)
                try:
                    yield piece
                finally:
                    used.unpacked.record(current)
        finally:
            for _, _, reading in coming:
                wait(reading)  # its slices are used again

    def prepare(self, room: Tensor) -> None:
        """No-op: device memory exists once it is allocated."""

    def close(self) -> None:
        self._readers.shutdown()
        self._stream.synchronize()
        self._slices.clear()
        self._buffers = SimpleQueue()

    def _slice(self, num_bytes: int) -> _Slice:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # It may be memory that was in use before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        memory.record_stream(self._stream)
        return _Slice(memory, torch.cuda.Event())

    def _begin(
        self, rows: StoredRows, begin: int, end: int
    ) -> tuple[_Slice, Tensor, list[Future[None]]]:
        """Start to read rows [begin, end) and to copy them to the next slice."""
        num_bytes = (end - begin) * rows.row_bytes
        used = self._slices[self._num_begun % NUM_SLICES]
        self._num_begun += 1
        if num_bytes > SLICE_BYTES:  # one row that is larger
            used = self._slice(num_bytes)
        self._stream.wait_event(used.unpacked)
        piece = used.memory[:num_bytes].view(end - begin, rows.row_bytes)
        part_bytes = min(READ_BYTES, max(MIN_READ_BYTES, num_bytes // NUM_READERS))
        step = max(1, part_bytes // rows.row_bytes)
        parts = ((at, min(at + step, end)) for at in range(begin, end, step))
        reading = [
            self._readers.submit(self._read, rows, at, to, piece[at - begin : to - begin])
            for at, to in parts
        ]
        return used, piece, reading

    def _read(self, rows: StoredRows, begin: int, end: int, there: Tensor) -> None:
        buffer = self._buffers.get()
        try:
            buffer.copied.synchronize()
            if there.nbytes > buffer.memory.nbytes:  # at first, as small models need little
                buffer = _pinned_buffer(there.nbytes)
            here = buffer.memory[: there.nbytes].view(there.shape)
            rows.read(begin, end, here)
            # The caller's tensors may be in inference mode, which is set per thread.
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                there.copy_(here, non_blocking=True)
                buffer.copied.record(self._stream)
        finally:
            self._buffers.put(buffer)


class PinnedHost:
    """The ExpertHost of a GPU: pinned memory, at addresses that its kernels can read."""

    def __init__(self, platform: CudaPlatform) -> None:
        self.device = platform.device
        self._platform = platform
        self._pages = LockedAhead(DevicePageLock(platform.device))

    def hold(self, tensor: Tensor) -> Tensor:
        """See ExpertHost."""
        try:
            area = self._pages.take(tensor.nbytes)
        except MemoryError as error:
            raise ModelError(f"--expert-memory: {error}") from None
        held = torch.from_numpy(area).view(tensor.dtype).view(tensor.shape)
        return held.copy_(tensor)

    def close(self) -> None:
        """See ExpertHost."""
        self._pages.close()

    def side_stream(self, *used: Tensor) -> AbstractContextManager[object]:
        """See CudaPlatform."""
        return self._platform.side_stream(*used)

    def join_side_stream(self) -> None:
        """See CudaPlatform."""
        self._platform.join_side_stream()


class EventWatch:
    """A Stopwatch of GPU events."""

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


MEASURED_ON = ("H100", "H200")  # words in the product names of GPUs on which luceasync was measured
# Architectures for which tests compile every kernel.
COMPILED_FOR_NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
COMPILED_FOR = (*COMPILED_FOR_NVIDIA, "gfx942", "gfx1100", "gfx1201")


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """A GPU of this machine: its name here, like "cuda:0", its product name, and the architecture
    (`kind`, like "sm_90") that kernels are compiled for.
    """

    name: str
    product: str
    kind: str
    free_bytes: int
    total_bytes: int

    @property
    def caution(self) -> str:
        """A warning about what has not been tested with this GPU; "" if luceasync was measured on
        one."""
        if any(word in self.product for word in MEASURED_ON):
            return ""
        if self.kind in COMPILED_FOR:
            return f"luceasync has not been run on one yet; its kernels compile for {self.kind}"
        return f"luceasync has not been run on one yet, nor its kernels compiled for {self.kind}"


def gpu_backend() -> str | None:
    """The GPU backend of this torch build, "cuda" or "hip"; None if there is no GPU."""
    if not torch.cuda.is_available():
        return None
    return "hip" if torch.version.hip else "cuda"


def torch_build() -> str:
    """The version of CUDA or ROCm that torch was built for."""
    return torch.version.cuda or torch.version.hip or "CPU only"


def num_gpus() -> int:
    """Number of GPUs."""
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
    """The architecture that kernels are compiled for."""
    if torch.version.hip:
        arch: str = torch.cuda.get_device_properties(index).gcnArchName
        return arch.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))
