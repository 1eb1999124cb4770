"""Rows of host memory and pages of all layers, copied in one launch, equal to the reference."""

import pytest
import torch
from torch import Tensor

from luceasync.cuda import pager
from luceasync.cuda.launch import CudaLauncher
from luceasync.host_cache.copies import HostRows, PageRows, pairs_of
from luceasync.host_cache.gpu_copies import kernel_page_copies
from luceasync.kv.cache import LaneCache
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.delta import DeltaSpec

NUM_LANES, NUM_PAGES = 2, 3
KINDS = {
    "one kind": [AttentionSpec(2, 1, 4, 4, 1e4, gated=False)] * 2,
    "two widths beside a recurrent layer": [
        AttentionSpec(2, 1, 4, 4, 1e4, gated=False),
        DeltaSpec(1, 1, 3, 5, 4),
        AttentionSpec(2, 2, 3, 2, 1e4, gated=False),
    ],
}


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator starts an OS thread for each: use few, with more work each."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(pager, "NUM_BLOCKS", 2)
        monkeypatch.setattr(pager, "BLOCK_THREADS", 3)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def cache(request: pytest.FixtureRequest, dtype: torch.dtype, device: torch.device) -> LaneCache:
    """Lanes of random bits."""
    cache = LaneCache(
        request.param,
        first_layer=5,
        num_lanes=NUM_LANES,
        num_pages=NUM_PAGES,
        dtype_of=lambda role: dtype,
        device=device,
    )
    for stack in cache.row_stacks:
        stack.copy_(torch.randn(stack.shape))
    return cache


def node(cache: LaneCache, begin: int, end: int) -> HostRows:
    """A node of these tokens, in memory that a device can read in place."""
    tensors = {
        key: torch.randn(shape, generator=torch.manual_seed(begin)).to(dtype)
        for key, (shape, dtype) in cache.row_shapes(end - begin).items()
    }
    if torch.cuda.is_available():
        tensors = {key: tensor.pin_memory() for key, tensor in tensors.items()}
    return HostRows(begin, end, 0, tensors, None)


def part(rows: HostRows, begin: int, end: int) -> HostRows:
    return HostRows(begin, end, rows.first + begin - rows.begin, rows.tensors, None)


def scattered(cache: LaneCache) -> list[PageRows]:
    """Chunks at random places, one of them in two nodes."""
    first, second = node(cache, 0, 90), node(cache, 90, 192)
    return [
        PageRows(part(second, 128, 192), 64),
        PageRows(part(first, 64, 90), 0),
        PageRows(part(second, 90, 128), 26),
        PageRows(part(first, 0, 1), 128),
    ]


def paging(device: torch.device):
    return kernel_page_copies(device, lambda tensor: True)


def copied(cache: LaneCache, lane: int, rows: list[PageRows], *, to_host: bool) -> None:
    """The reference: run by run."""
    for here, there in pairs_of(cache.row_bytes(lane), rows):
        target, source = (there, here) if to_host else (here, there)
        target.copy_(source)


def bits(stacks: list[Tensor]) -> list[Tensor]:
    return [stack.clone().view(torch.uint8) for stack in stacks]


@pytest.mark.parametrize("lane", [0, 1])
def test_gathered_rows_lie_where_they_belong_and_nothing_else_has_changed(cache, device, lane):
    rows, before = scattered(cache), [stack.clone() for stack in cache.row_stacks]
    copied(cache, lane, rows, to_host=False)
    expected = bits(cache.row_stacks)
    for stack, old in zip(cache.row_stacks, before, strict=True):
        stack.copy_(old)
    paging(device).gather(cache, lane, rows)
    assert all(map(torch.equal, bits(cache.row_stacks), expected))


def test_scattered_rows_come_back_as_they_went(cache, device):
    rows = scattered(cache)
    truth = [PageRows(node(cache, *span), place) for span, place in (((0, 70), 64), ((70, 72), 3))]
    found = [
        PageRows(HostRows(0, 70, 1, node(cache, 0, 71).tensors, None), 64),
        PageRows(HostRows(70, 72, 0, node(cache, 70, 72).tensors, None), 3),
    ]
    copied(cache, 1, truth, to_host=True)
    paging(device).scatter(cache, 1, found)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for ours, theirs in zip(found, truth, strict=True):
        for key, tensor in theirs.host.tensors.items():
            rows = ours.host.tensors[key][ours.host.first :]
            assert rows.view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))


def test_an_empty_launch_does_nothing(cache, device):
    before = bits(cache.row_stacks)
    paging(device).gather(cache, 0, [])
    assert all(map(torch.equal, bits(cache.row_stacks), before))


def test_a_rehearsal_writes_nothing(cache, device):
    before = bits(cache.row_stacks)
    paging(device).rehearse(cache)
    assert all(map(torch.equal, bits(cache.row_stacks), before))


def test_memory_that_no_device_can_read_in_place_is_copied_run_by_run(cache, device):
    rows = scattered(cache)
    kernel_page_copies(device, lambda tensor: False).gather(cache, 0, rows)
    found = bits(cache.row_stacks)
    copied(cache, 0, rows, to_host=False)
    assert all(map(torch.equal, bits(cache.row_stacks), found))
    for key, here in cache.row_bytes(0).items():
        first = rows[0].host.tensors[key][38:39].view(-1).view(torch.uint8).to(device)
        assert here[64 * first.numel() :][: first.numel()].equal(first)


def test_a_kernel_needs_a_gpu_or_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.ENABLE_CUDASIM", 0)
    with pytest.raises(ValueError, match="cpu: a CUDA device is expected"):
        CudaLauncher(torch.device("cpu"))
