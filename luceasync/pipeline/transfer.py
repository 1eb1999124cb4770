"""How numbers cross from one device to the next, peer to peer where allowed, else over the host;
and how those that the host makes up begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from luceasync.errors import PlacementError

Transfer = Callable[[Tensor, torch.device], Tensor]
Arrival = torch.cuda.Event  # of a copy on the host


def direct(x: Tensor, device: torch.device) -> Tensor:
    """One copy, in the order of the streams; nobody waits unless the host is to read it."""
    # To the host a copy that does not block could be read before it is complete.
    return x.to(device, non_blocking=device.type != "cpu")


def staged(x: Tensor, device: torch.device) -> Tensor:
    """Through host memory, for GPUs that must not reach into each other's."""
    crosses = x.device.type != "cpu" and device.type != "cpu" and x.device != device
    return direct(x.cpu() if crosses else x, device)


def landing(num_numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host, to which `queue_copy` copies from the device: a copy to memory that is not
    pinned would wait for a GPU.
    """
    return torch.zeros(num_numbers, dtype=dtype, pin_memory=device.type != "cpu")


def queue_copy(source: Tensor, target: Tensor) -> Arrival | None:
    """Copy to `target` on the host, in the order of the source's stream; nobody waits where a GPU
    does it. What comes when it is there, None: now.
    """
    target.copy_(source, non_blocking=True)
    if source.device.type == "cpu":
        return None
    event: Arrival = torch.cuda.current_stream(source.device).record_event()
    return event


class Sent:
    """Numbers on their way to the host, in memory of their own: a Coming of
    luceasync.ranking.local.
    """

    __slots__ = ("_arrival", "_numbers")

    def __init__(self, x: Tensor) -> None:
        """The copy of `x` is queued. A GPU writes it where it is read: what is copied to pageable
        memory is written there by the host itself, page by page.
        """
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
        self._arrival = queue_copy(x, copy)
        self._numbers = copy.numpy()  # the same memory

    def fetch(self) -> np.ndarray:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers


class Sender:
    """Sends numbers to the host. While a device works: memory and events are made when they are
    asked for, and what was sent last is let go when the next numbers are, not when the device waits
    for the host.
    """

    def __init__(self) -> None:
        self._last: Sent | None = None

    def __call__(self, x: Tensor) -> Sent:
        self._last = sent = Sent(x)
        return sent


class Brief:
    """A few integers that the host tells a captured pass: int32 `there`, where it runs.

    The pass begins with `take`, a copy of them out of memory that the host writes. So telling them
    costs the host no copy of its own, and no memory is made for them.
    """

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        """`numbers`: those that are told at first, and as many as there are."""
        self._here = landing(len(numbers), torch.int32, device)
        self._format, self._bytes = Struct(f"={len(numbers)}i"), self._here.numpy().data
        self._taken = None if device.type == "cpu" else Arrival()  # by the last replay
        self.there = torch.tensor(numbers, dtype=torch.int32, device=device)
        self.put(numbers)

    def put(self, numbers: Sequence[int]) -> None:
        """The next replay takes these. Waits for the one before, which might not have taken its own
        yet: not at all where the host has seen what came of that.
        """
        if self._taken is not None:
            self._taken.synchronize()
        self._format.pack_into(self._bytes, 0, *numbers)

    def take(self) -> None:
        """Captured at the front of what reads them."""
        self.there.copy_(self._here, non_blocking=True)

    def replayed(self) -> None:
        """What takes them is queued: call it behind every replay."""
        if self._taken is not None:
            self._taken.record()

    def send(self, numbers: Sequence[int]) -> None:
        """Tell them by a copy of its own, for a pass that does not take them: it may be queued
        behind another one that still reads its own, and nobody waits.
        """
        self.there.copy_(on_host(numbers, np.int32), non_blocking=True)


def on_host(numbers: Sequence[int] | Sequence[Sequence[int]], dtype: type[np.integer]) -> Tensor:
    """A few integers, by way of NumPy, which reads lists three times as fast. A copy of them to a
    GPU need not be waited for: so few bytes are staged before the call returns.
    """
    return torch.from_numpy(np.array(numbers, dtype))


def as_rows(given: Tensor | Sequence[int]) -> Tensor:
    """Tokens of a decode step as int64 [entries, 1]; an activation as it is."""
    return given if isinstance(given, Tensor) else on_host(given, np.int64)[:, None]


def choose_transfer(peer_access: str, devices: Sequence[torch.device]) -> Transfer:
    """`peer_access`: "auto", "on" or "off". Raises PlacementError if "on" cannot be honoured."""
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
    """Indices of neighbours in the chain that are different GPUs."""
    indices = [d.index for d in devices if d.type != "cpu"]
    return [(a, b) for a, b in itertools.pairwise(indices) if a != b]
