"""Devices of this machine: those that the user named, or the default one, and host memory for
them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from luceasync.errors import PlacementError
from luceasync.host_cache.arena import DevicePageLock, HostMemory
from luceasync.ipc.memory import Register
from luceasync.pipeline.gpu_platform import gpu_backend, num_gpus
from luceasync.pipeline.offer import Offer, machine_of, offer_of
from luceasync.pipeline.platform import open_platform
from luceasync.pipeline.shard_plan import check_devices

log = logging.getLogger(__name__)


def find_devices(names: Sequence[str], flag: str = "--target-devices") -> tuple[Offer, ...]:
    """Offers of the named devices, or of the default device. Raises PlacementError that names
    `flag`."""
    full = check_devices(names, flag) if names else (default_device(),)
    for name in full:
        _check_is_here(name, flag)
    num_on_host = sum(not _runs_async(name) for name in full)  # CPU devices share its memory
    return tuple(
        open_platform(name).offer(1 if _runs_async(name) else num_on_host) for name in full
    )


def offers_of(names: Sequence[str], flag: str = "--target-devices") -> tuple[Offer, ...]:
    """Like find_devices for full names, without dividing host memory: see `share_host_memory`."""
    for name in names:
        _check_is_here(name, flag)
    return tuple(open_platform(name).offer() for name in names)


def share_host_memory(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Divide a machine's memory among its devices that compute on the host, in whichever processes
    they are."""
    num_on_host = Counter(machine_of(offer.name) for offer in offers if not offer.runs_async)
    return tuple(
        offer
        if offer.runs_async
        else replace(offer, free_bytes=offer.free_bytes // num_on_host[machine_of(offer.name)])
        for offer in offers
    )


def has_backend(name: str) -> bool:
    """Whether this process can open devices of that backend."""
    return name.partition(":")[0] in ("cpu", gpu_backend())


def default_device() -> str:
    """The first GPU if there is one, otherwise the CPU."""
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
    """Memory for saved nodes of these devices, which belong to this process.

    With a GPU among them all of it is pinned; what exceeds twice the `lanes_bytes` of all lanes is
    pinned only while `quiet` is set. Without a GPU, `warm_bytes` of its pages are touched. A thread
    does this in the background. If memory cannot be pinned, copies are slower, and a warning is
    logged.
    """
    beside = [name for name in devices if _runs_async(name)]
    first = [*beside, *devices, "cpu:0"][0]  # no devices: the whole model is in other processes
    return open_platform(first).node_memory(
        capacity_bytes, warm_bytes=warm_bytes, quiet=quiet, lanes_bytes=lanes_bytes
    )


def page_lock_for(devices: Sequence[str]) -> Register:
    """The page lock for memory that these devices of this process share with other processes. Does
    nothing without GPUs. If memory cannot be pinned, copies are slower, and a warning is logged."""
    beside = [name for name in devices if _runs_async(name)]
    if not beside:
        return lambda memory: lambda: None
    pages = DevicePageLock(open_platform(beside[0]).device)

    def register(memory: memoryview) -> Callable[[], None]:
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        try:
            pages.lock(address, memory.nbytes)
        except MemoryError as error:
            log.warning("shared memory cannot be pinned, copies will be slower: %s", error)
            return lambda: None
        return lambda: pages.unlock(address)

    return register


def _runs_async(name: str) -> bool:
    return offer_of(name, 0).runs_async


def _check_is_here(name: str, flag: str) -> None:
    if machine := machine_of(name):
        raise PlacementError(
            f"{flag} {name}: nothing reaches {machine}; name its listener, such as "
            f"--target-shard-ipc-bin cuda@{machine}=tls://{machine}:7000"
        )
    backend, _, index = name.partition(":")
    present = gpu_backend()
    if backend not in ("cpu", present):
        here = "cpu" if present is None else f"cpu, {present}"
        raise PlacementError(
            f"{flag} {name}: this torch build and machine offer {here}, not {backend}"
        )
    if backend == present and int(index) >= num_gpus():
        raise PlacementError(
            f"{flag} {name}: index out of range; there are {num_gpus()} {backend} devices"
        )
