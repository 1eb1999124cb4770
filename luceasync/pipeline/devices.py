"""What this machine has: the devices that the user named, or its best one, and what they offer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from luceasync.errors import PlacementError
from luceasync.host_cache.arena import DevicePageLock, HostMemory
from luceasync.ipc.memory import Register
from luceasync.pipeline.gpu_platform import gpu_backend, num_gpus
from luceasync.pipeline.offer import Offer, offer_of
from luceasync.pipeline.platform import open_platform
from luceasync.pipeline.shard_plan import check_devices

log = logging.getLogger(__name__)


def find_devices(names: Sequence[str], flag: str = "--target-devices") -> tuple[Offer, ...]:
    """What the devices offer that the user named, or this machine's best one. Raises
    PlacementError, which names `flag`.
    """
    full = check_devices(names, flag) if names else (default_device(),)
    for name in full:
        _check_is_here(name, flag)
    num_on_host = sum(not _computes_beside(name) for name in full)  # they share its memory
    return tuple(
        open_platform(name).offer(1 if _computes_beside(name) else num_on_host) for name in full
    )


def offers_of(names: Sequence[str], flag: str = "--target-devices") -> tuple[Offer, ...]:
    """As find_devices, of devices by name, each with all that is free there: see `shared`."""
    for name in names:
        _check_is_here(name, flag)
    return tuple(open_platform(name).offer() for name in names)


def shared(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Devices that compute on the host share its memory, whatever their process."""
    num_on_host = sum(not offer.computes_beside for offer in offers)
    return tuple(
        offer
        if offer.computes_beside
        else replace(offer, free_bytes=offer.free_bytes // num_on_host)
        for offer in offers
    )


def has_backend(name: str) -> bool:
    """Whether devices of that kind are of this process."""
    return name.partition(":")[0] in ("cpu", gpu_backend())


def default_device() -> str:
    """The first GPU if there is one, else the CPU."""
    gpus = gpu_backend()
    return f"{gpus}:0" if gpus else "cpu:0"


def host_memory(
    devices: Sequence[str],
    capacity_bytes: int,
    *,
    warm_bytes: int = 0,
    quiet: threading.Event | None = None,
    lanes_bytes: int = 0,
) -> HostMemory:
    """Memory for the saved nodes of these devices of this process: all of it pinned if a GPU is
    among them, what is more than twice the `lanes_bytes` of all lanes while `quiet` is set; else
    with `warm_bytes` whose pages are there soon. Either is begun here and done in a thread. Where
    nothing can be pinned copies are slower, and a warning says so.
    """
    beside = [name for name in devices if _computes_beside(name)]
    first = [*beside, *devices, "cpu:0"][0]  # none: all of the model is in other processes
    return open_platform(first).node_memory(
        capacity_bytes, warm_bytes=warm_bytes, quiet=quiet, lanes_bytes=lanes_bytes
    )


def pinned_by(devices: Sequence[str]) -> Register:
    """How memory that others map too is pinned for these devices of this process: not at all where
    none computes beside. Where nothing can be pinned copies are slower, and a warning says so.
    """
    beside = [name for name in devices if _computes_beside(name)]
    if not beside:
        return lambda memory: lambda: None
    pages = DevicePageLock(open_platform(beside[0]).device)

    def register(memory: memoryview) -> Callable[[], None]:
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        try:
            pages.lock(address, memory.nbytes)
        except MemoryError as error:
            log.warning("copies are slower, of memory that is not pinned: %s", error)
            return lambda: None
        return lambda: pages.unlock(address)

    return register


def _computes_beside(name: str) -> bool:
    return offer_of(name, 0).computes_beside


def _check_is_here(name: str, flag: str) -> None:
    backend, _, index = name.partition(":")
    present = gpu_backend()
    if backend not in ("cpu", present):
        here = "cpu" if present is None else f"cpu, {present}"
        raise PlacementError(
            f"{flag} {name}: this torch build and machine offer {here}, not {backend}"
        )
    if backend == present and int(index) >= num_gpus():
        raise PlacementError(
            f"{flag} {name}: index out of range; {num_gpus()} {backend} devices are there"
        )
