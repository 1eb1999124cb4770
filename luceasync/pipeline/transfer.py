"""How numbers cross from one device to the next, peer to peer where allowed, else over the host;
and how those that the host makes up begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

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


def fetch(x: Tensor) -> Tensor:
    """A copy on the host, which waits for it. The GPU writes it where it is read: what is copied to
    pageable memory is written there by the host itself, page by page.
    """
    if x.device.type == "cpu":
        return x
    here = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    here.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return here


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
