"""Copies of tensors between devices, peer to peer where allowed, otherwise through the host, and of
numbers between the host and a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from luceasync.errors import PlacementError

Transfer = Callable[[Tensor, torch.device], Tensor]
Arrival = torch.cuda.Event  # the end of a copy to the host


def direct(x: Tensor, device: torch.device) -> Tensor:
    """Copy once, in stream order; waits only if the host will read the result."""
    # A non-blocking copy to the host could be read before it is complete.
    return x.to(device, non_blocking=device.type != "cpu")


def staged(x: Tensor, device: torch.device) -> Tensor:
    """Copy through host memory, between GPUs that must not access each other's memory."""
    crosses = x.device.type != "cpu" and device.type != "cpu" and x.device != device
    return direct(x.cpu() if crosses else x, device)


def host_buffer(num_numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host for `queue_copy` from the device. Pinned: a copy to pageable memory would
    wait for the GPU.
    """
    return torch.zeros(num_numbers, dtype=dtype, pin_memory=device.type != "cpu")


def new_arrival(device: torch.device) -> Arrival | None:
    """An event for copies between the device and pinned memory; None: they are done at once."""
    return None if device.type == "cpu" else Arrival()


def queue_copy(source: Tensor, target: Tensor) -> Arrival | None:
    """Copy to `target` on the host in the order of the source's stream, without waiting for a GPU.
    Returns the event of its end; None: it is done.
    """
    target.copy_(source, non_blocking=True)
    if source.device.type == "cpu":
        return None
    event: Arrival = torch.cuda.current_stream(source.device).record_event()
    return event


class HostCopy:
    """A copy of a tensor in transit to the host, in separate memory; a Coming of
    luceasync.ranking.local."""

    __slots__ = ("_arrival", "_numbers")

    def __init__(self, x: Tensor) -> None:
        """Queue the copy of `x`. A GPU writes to pinned memory itself; pageable memory is written
        by the host, page by page.
        """
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
        self._arrival = queue_copy(x, copy)
        self._numbers = copy.numpy()  # the same memory

    def fetch(self) -> np.ndarray:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers


class HostCopier:
    """Copies tensors to the host while the device works. Memory and events are made when a copy is
    queued, and those of the last copy are freed at the next one, not while the device waits for the
    host.
    """

    def __init__(self) -> None:
        self._last: HostCopy | None = None

    def __call__(self, x: Tensor) -> HostCopy:
        self._last = copy = HostCopy(x)
        return copy


class HostInput:
    """A tensor that the host passes to a captured pass: `values`, on the pass's device.

    The pass begins with `take`, a copy from pinned memory, so setting the values costs the host no
    copy to the device and no allocation.

        put(v1)  replay: take v1 ...                   device reads v1 when it gets there
        put(v2)  waits until that replay has taken v1, then replay: take v2 ...
    """

    def __init__(self, given: Tensor, device: torch.device) -> None:
        """`given`: the initial values, on the host."""
        self._here = host_buffer(given.numel(), given.dtype, device).view_as(given)
        self._taken = new_arrival(device)  # by the last replay
        self.values = given.to(device, copy=True)
        self.put(given)

    def put(self, given: Tensor) -> None:
        """Set the values for the next replay. Waits until the last replay has taken its values,
        which has happened if the host has seen its result."""
        self.wait()
        self._here.copy_(given)

    def take(self) -> None:
        """Copy the values to the device; captured at the start of the pass that reads them."""
        self.values.copy_(self._here, non_blocking=True)

    def wait(self) -> None:
        """Wait until the last replay has ended."""
        if self._taken is not None:
            self._taken.synchronize()

    def replayed(self) -> None:
        """Record that a replay is queued. Call it after each one."""
        if self._taken is not None:
            self._taken.record()


class PassParameters(HostInput):
    """A few integers that the host passes to a captured pass: int32 `values`."""

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        """`numbers`: the initial values."""
        super().__init__(on_host(numbers, np.int32), device)
        self._format, self._bytes = Struct(f"={len(numbers)}i"), self._here.numpy().data

    def put_numbers(self, numbers: Sequence[int]) -> None:
        """`put` without a tensor."""
        self.wait()
        self._format.pack_into(self._bytes, 0, *numbers)

    def send(self, numbers: Sequence[int]) -> None:
        """Set the values by a copy in stream order, for a pass that does not take them. Does not
        wait: an earlier pass may still read the old ones.
        """
        self.values.copy_(on_host(numbers, np.int32), non_blocking=True)


def on_host(numbers: Sequence[int] | Sequence[Sequence[int]], dtype: type[np.integer]) -> Tensor:
    """A few integers as a tensor, through NumPy, which reads lists three times as fast. A
    non-blocking copy of it to a GPU is safe: data this small is staged before the call returns."""
    return torch.from_numpy(np.array(numbers, dtype))


def as_rows(given: Tensor | Sequence[int]) -> Tensor:
    """Tokens of a decode step as int64 [entries, 1]; an activation as it is."""
    return given if isinstance(given, Tensor) else on_host(given, np.int64)[:, None]


def choose_transfer(peer_access: str, devices: Sequence[torch.device]) -> Transfer:
    """The way to copy between these devices. `peer_access`: "auto", "on" or "off". Raises
    PlacementError if "on" is not possible."""
    if peer_access == "off":
        return staged
    for first, second in _gpu_pairs(devices):
        if not torch.cuda.can_device_access_peer(first, second):
            if peer_access == "on":
                raise PlacementError(
                    f"--peer-access on: cuda:{first} cannot reach cuda:{second}; "
                    "allowed here: auto, off"
                )
            return staged
    return direct


def _gpu_pairs(devices: Sequence[torch.device]) -> list[tuple[int, int]]:
    """Pairs of different GPUs that are adjacent in the chain, by index."""
    indices = [d.index for d in devices if d.type != "cpu"]
    return [(a, b) for a, b in itertools.pairwise(indices) if a != b]
