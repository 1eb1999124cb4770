"""Devices must exist; their names are completed, and may occur once."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest
import torch

from luceasync.errors import PlacementError
from luceasync.host_cache.arena import DevicePageLock, PlainMemory, WarmMemory
from luceasync.pipeline.devices import (
    default_device,
    find_devices,
    host_memory,
)
from luceasync.pipeline.gpu_platform import gpu_backend

GIB = 2**30


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 GiB of RAM are free."""
    free = SimpleNamespace(available=12 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build that finds two GPUs with 70 and 80 GiB free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((70 + 10 * i) * GIB, 90 * GIB))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)


@pytest.mark.parametrize(
    ("names", "shares"),
    [(["cpu"], [12]), (["cpu:0", "cpu:1"], [6, 6]), (["cpu:0", "cpu:1", "cpu:7"], [4, 4, 4])],
)
def test_logical_cpu_devices_share_the_ram(ram: None, names: list[str], shares: list[int]):
    assert [device.free_bytes for device in find_devices(names)] == [s * GIB for s in shares]


def test_gpus_and_the_cpu_each_have_their_own_memory(ram: None, two_gpus: None):
    found = find_devices(["cuda:1", "cpu", "cuda"])
    assert [(device.name, device.free_bytes // GIB) for device in found] == [
        ("cuda:1", 80),
        ("cpu:0", 12),
        ("cuda:0", 70),
    ]


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "hip:3"])
def test_a_gpu_that_is_not_there_is_refused_in_one_line(no_gpu: None, name: str):
    backend = name.partition(":")[0]
    with pytest.raises(PlacementError) as caught:
        find_devices(["cpu", name])
    words = str(caught.value)
    assert words.startswith(f"--target-devices {backend}:") and "\n" not in words
    assert words.endswith(f"this torch build and machine offer cpu, not {backend}")


def test_the_other_vendors_gpu_is_refused_with_what_is_there(two_gpus: None):
    with pytest.raises(PlacementError, match=r"hip:0: .* offer cpu, cuda, not hip"):
        find_devices(["hip"])


def test_an_index_past_the_last_gpu_is_refused_with_their_number(two_gpus: None):
    with pytest.raises(
        PlacementError, match=r"cuda:2: index out of range; there are 2 cuda devices"
    ):
        find_devices(["cuda:1", "cuda:2"])


def test_the_default_is_the_first_gpu_else_the_cpu(ram: None, two_gpus: None, monkeypatch):
    assert [device.name for device in find_devices([])] == ["cuda:0"] == [default_device()]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert (gpu_backend(), default_device()) == ("hip", "hip:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [device.name for device in find_devices([])] == ["cpu:0"]


def test_nodes_of_cpus_lie_in_plain_memory():
    assert isinstance(host_memory(["cpu:0", "cpu:1"], 2**30), PlainMemory)


def test_a_part_of_it_is_warm_where_that_is_asked_for():
    memory = host_memory(["cpu:0"], 2**30, warm_bytes=2**20)
    assert isinstance(memory, WarmMemory) and memory.wait(30)
    memory.close()


def test_memory_that_cannot_be_pinned_serves_all_the_same(two_gpus: None, monkeypatch, caplog):
    def refuse(self: DevicePageLock, address: int, num_bytes: int) -> None:
        raise MemoryError("the driver pins no 1 MiB more")

    monkeypatch.setattr(DevicePageLock, "lock", refuse)
    assert isinstance(host_memory(["cpu:0", "cuda:0"], 2**20), PlainMemory)
    assert "cannot be pinned, copies will be slower: the driver pins no 1 MiB more" in caplog.text
