"""Devices of a measurement: the report's head, clocks, CUDA graphs, and physical limits."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from luceasync.bench.report import Clock, Report, Run, median
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.platform import open_platform

CPU_COPY_BYTES, GPU_COPY_BYTES = 1 << 28, 4 << 30  # more than any cache holds
MATMUL_SIZE, CPU_MATMUL_SIZE = 8192, 1024


def open_report(devices: Sequence[str], *, is_json: bool = False) -> Report:
    """A report headed by this machine. Raises PlacementError if a device is missing."""
    find_devices(devices, "--device")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {
        "devices": ",".join(devices),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "GPUs": ", ".join(gpus) or "none",
        "torch": torch.__version__,
    }
    return Report(machine, is_json=is_json)


def is_gpu(device: str) -> bool:
    """Whether the device runs a queue with events and graphs."""
    return open_platform(device).device.index is not None


def device_kind(device: str) -> str:
    """A GPU's name, as torch reports it, or "cpu"."""
    place = open_platform(device).device
    return torch.cuda.get_device_name(place) if is_gpu(device) else place.type


def gpu_pair(device: str) -> tuple[str, ...]:
    """The first two GPUs of the device's backend; empty if there is only one."""
    backend = device.partition(":")[0]
    return (f"{backend}:0", f"{backend}:1") if torch.cuda.device_count() > 1 else ()


def runs_cuda(device: str) -> bool:
    """Whether kernels in CUDA C++ run on it."""
    return device.startswith("cuda")


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release_memory() -> None:
    """Release the GPU's cached memory, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def at_rest(run: Run) -> float:
    """A clock: seconds of one run until the device is idle again."""
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def by_events(run: Run) -> float:
    """A clock: seconds of one run between events of the GPU's current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def clock_of(device: str) -> Clock:
    """`by_events` on a GPU, otherwise `at_rest`."""
    return by_events if is_gpu(device) else at_rest


def captured(run: Run) -> Run:
    """Capture `run` as a CUDA graph and return its replay, whose time includes no launches. The
    replay keeps `run` alive, and with it the tensors that the graph reads.
    """
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(read_by: Run = run) -> None:
        graph.replay()

    return replay


def num_copies(weight_bytes: int, chain_bytes: int = 400_000_000) -> int:
    """How many weights a chain of products needs so that they do not fit into any cache."""
    return max(3, -(-chain_bytes // weight_bytes))


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a plain copy on the device."""
    place = open_platform(device).device
    num_bytes = GPU_COPY_BYTES if is_gpu(device) else CPU_COPY_BYTES
    source = torch.ones(num_bytes, dtype=torch.uint8, device=place)
    target = torch.zeros_like(source)
    return 2 * num_bytes / _median_seconds(lambda: target.copy_(source), 10)


def host_bandwidth(device: str, num_bytes: int = CPU_COPY_BYTES) -> float:
    """Bytes per second of a plain copy from host memory, pinned for a GPU, to the device."""
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu(device))
    there = torch.empty(num_bytes, dtype=torch.uint8, device=open_platform(device).device)
    copies = [clock_of(device)(lambda: there.copy_(host, non_blocking=True)) for _ in range(6)]
    return num_bytes / min(copies[1:])


def matmul_rate(device: str) -> float:
    """Operations per second of a large square product in bf16, on a CPU in fp32."""
    place, dtype = open_platform(device).device, torch.bfloat16
    size, num_runs = MATMUL_SIZE, 20
    if not is_gpu(device):
        size, num_runs, dtype = CPU_MATMUL_SIZE, 5, torch.float32
    a, b = (torch.randn(size, size, device=place, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _median_seconds(lambda: a @ b, num_runs)


def _median_seconds(run: Run, num_runs: int) -> float:
    seconds = [at_rest(run) for _ in range(num_runs + 2)]
    return median(seconds[2:])
