"""Plain reads of files into memory and copies of it: what no restore can be faster than."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from luceasync.bench.device import synchronize
from luceasync.cyext.flatten import fill
from luceasync.pipeline.platform import open_platform


def prepare(files: Sequence[Path], state: str) -> None:
    """Make the files' pages be, or not be, in the page cache; a virtual machine's disk may keep
    them where we cannot tell. To be called last: memory that has been free for long is slower.
    """
    for file in files:
        with file.open("rb") as raw:
            if state == "disk":
                os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while raw.read(1 << 24):
                    pass


def plain_read(files: Sequence[Path], device: str, num_readers: int, state: str) -> float:
    """Seconds to read the files into memory that is there, and then copy it to the device."""
    place = open_platform(device).device
    sizes = [file.stat().st_size for file in files]
    on_gpu = place.index is not None  # the CPU has no index
    hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for size in sizes]
    targets = [torch.zeros(size, dtype=torch.uint8, device=place) for size in sizes]
    synchronize()
    prepare(files, state)
    with ThreadPoolExecutor(num_readers) as pool:
        started = time.perf_counter()
        for _ in (map if num_readers == 1 else pool.map)(fill_from, files, hosts):
            pass
    for target, host in zip(targets, hosts, strict=True):
        if on_gpu:
            target.copy_(host, non_blocking=True)
        else:  # twice as fast as torch copies bytes
            fill(target.numpy(), [0], [host.numpy()])
    synchronize()
    return time.perf_counter() - started


def fill_from(file: Path, host: torch.Tensor) -> None:
    """Fill the tensor with the file."""
    region, done = bytes_of(host), 0
    with file.open("rb", buffering=0) as raw:
        while done < len(region):
            done += raw.readinto(region[done:]) or 0


def bytes_of(host: torch.Tensor) -> memoryview:
    """The tensor's own memory, as whoever fills it sees it."""
    memory: Any = host.numpy()
    return memoryview(memory)
