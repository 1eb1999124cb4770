"""What a device is, how its time is taken, and the physical limits that figures stand beside."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from luceasync.bench.figures import median
from luceasync.bench.rounds import Run
from luceasync.pipeline.platform import open_platform

COPY_BYTES = 4 << 30  # a copy that no cache of a GPU holds
MATMUL_SIZE = 8192


def describe(devices: Sequence[str]) -> dict[str, object]:
    """The machine in a line."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "devices": ",".join(devices),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "GPUs": ", ".join(gpus) or "none",
        "torch": torch.__version__,
    }


def synchronize() -> None:
    """Wait until the GPU has done what it was given, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def at_rest(run: Run) -> float:
    """A clock: seconds until the device has done all of one run."""
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def by_events(run: Run) -> float:
    """A clock: seconds of one run by the GPU's own events, on its current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def captured(run: Run) -> Run:
    """What replays `run` as one CUDA graph: no launch is part of its time. Whatever `run` reads is
    kept with it.
    """
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(read_by: Run = run) -> None:
        graph.replay()

    return replay


def num_copies(weight_bytes: int, chain_bytes: int = 400_000_000) -> int:
    """How many weights a chain of products goes through, so that no cache holds them all."""
    return max(3, -(-chain_bytes // weight_bytes))


def copy_bandwidth(device: str, num_bytes: int = COPY_BYTES) -> float:
    """Bytes read and written per second by a plain copy of `num_bytes`, on the device."""
    place = open_platform(device).device
    source = torch.ones(num_bytes, dtype=torch.uint8, device=place)
    target = torch.zeros_like(source)
    return 2 * num_bytes / _median_seconds(lambda: target.copy_(source), 10)


def matmul_rate(device: str, size: int = MATMUL_SIZE) -> float:
    """bf16 operations per second of a large square product, on the device."""
    place = open_platform(device).device
    a, b = (torch.randn(size, size, device=place, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _median_seconds(lambda: a @ b, 20)


def _median_seconds(run: Run, num_runs: int) -> float:
    seconds = [at_rest(run) for _ in range(num_runs + 2)]
    return median(seconds[2:])
