"""What this machine has: compute devices, their free memory, the dtype that suits them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import psutil
import torch

from luceasync.errors import PlacementError
from luceasync.hoststore.arena import SPARE_BYTES, Arena, DevicePageLock, WarmMemory
from luceasync.hoststore.memory import HostMemory, PlainMemory
from luceasync.models.precision import Dtype
from luceasync.pipeline.ranges import BACKENDS, Device, check_devices

log = logging.getLogger(__name__)


def find_devices(names: Sequence[str], flag: str = "--target-devices") -> tuple[Device, ...]:
    """The devices that the user named, or this machine's best one. Raises PlacementError, which
    names `flag`.
    """
    full = check_devices(names, flag) if names else (default_device(),)
    num_cpus = sum(name.startswith("cpu:") for name in full)
    return tuple(_find(name, num_cpus, flag) for name in full)


def default_device() -> str:
    """The first GPU if there is one, else the CPU."""
    gpus = gpu_backend()
    return f"{gpus}:0" if gpus else "cpu:0"


def gpu_backend() -> str | None:
    """The GPU platform of this torch build, if a GPU is there: "cuda", "hip" or None."""
    if not torch.cuda.is_available():
        return None
    return "hip" if torch.version.hip else "cuda"


def torch_device(name: str) -> torch.device:
    """The torch device of a device name: torch calls HIP devices "cuda", and the CPU has no
    index.
    """
    backend, _, index = name.partition(":")
    return torch.device("cpu") if backend == "cpu" else torch.device("cuda", int(index))


def host_memory(
    devices: Sequence[str],
    capacity_bytes: int,
    *,
    warm_bytes: int = 0,
    quiet: threading.Event | None = None,
    lanes_bytes: int = 0,
) -> HostMemory:
    """Memory for the saved nodes of these devices: all of it pinned if a GPU is among them, what is
    more than twice the `lanes_bytes` of all lanes while `quiet` is set; else with `warm_bytes`
    whose pages are there soon. Either is begun here and done in a thread. Where nothing can be
    pinned copies are slower, and a warning says so.
    """
    gpus = [name for name in devices if not name.startswith("cpu:")]
    if not gpus:
        return WarmMemory(warm_bytes, capacity_bytes) if warm_bytes else PlainMemory()
    try:
        pages = DevicePageLock(torch_device(gpus[0]))
        # Half of the spare memory may be used before there is more: every lane can still be saved.
        spare_bytes = max(SPARE_BYTES, 2 * lanes_bytes)
        return Arena(capacity_bytes, pages, quiet=quiet, spare_bytes=spare_bytes)
    except MemoryError as error:
        log.warning("the prefix cache is slower, in memory that is not pinned: %s", error)
        return PlainMemory()


def default_dtype(devices: Sequence[Device]) -> Dtype:
    """bf16 where every device computes in it natively, else fp32."""
    on_gpu = any(device.backend != "cpu" for device in devices)
    on_cpu = any(device.backend == "cpu" for device in devices)
    gpu_ok = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    cpu_ok = not on_cpu or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bf16" if gpu_ok and cpu_ok else "fp32"


def _find(name: str, num_cpus: int, flag: str) -> Device:
    backend, _, index = name.partition(":")
    if backend == "cpu":
        return Device(name, psutil.virtual_memory().available // num_cpus)
    present = gpu_backend()
    if backend != present:
        here = "cpu" if present is None else f"cpu, {present}"
        assert backend in BACKENDS
        raise PlacementError(
            f"{flag} {name}: this torch build and machine offer {here}, not {backend}"
        )
    count = torch.cuda.device_count()
    if int(index) >= count:
        raise PlacementError(
            f"{flag} {name}: index out of range; {count} {backend} devices are there"
        )
    free_bytes, _ = torch.cuda.mem_get_info(int(index))
    return Device(name, free_bytes)
