"""Every platform follows the protocol, and does without what its device lacks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gguf
import msgspec
import pytest
import torch

from luceasync.host_cache.copies import DirectCopies
from luceasync.models.encodings import StoredRows, WeightFile
from luceasync.models.quant import ggml
from luceasync.pipeline import gpu_platform
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.gpu_platform import CudaPlatform, HipPlatform
from luceasync.pipeline.offer import Offer
from luceasync.pipeline.platform import Platform, open_platform

GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)


def picked_body(platform: Platform, **bodies: str) -> str:
    """The body that the platform picks; the others are not even made."""
    made: list[str] = []

    def maker(name: str):
        return lambda: made.append(name) or name

    found = platform.pick(**{name: maker(name) for name in bodies})
    assert made == [found]
    return found


def test_torch_knows_neither_hip_nor_an_index_of_the_cpu():
    assert CpuPlatform("cpu:3").device == torch.device("cpu")
    cuda, hip = CudaPlatform("cuda:1"), HipPlatform("hip:1")
    assert cuda.device == hip.device == torch.device("cuda", 1)
    assert (cuda.name, hip.name) == ("cuda:1", "hip:1")


@pytest.mark.parametrize("name", ["cuda:0", "hip:0"])
def test_a_gpu_that_this_process_has_not_is_not_opened(name: str, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AssertionError, match=f"{name}, but this process has None"):
        open_platform(name)


@pytest.mark.parametrize(
    ("platform", "has_numba", "picked"),
    [
        (CpuPlatform(), True, ("torch", "torch", "torch")),
        (CudaPlatform("cuda:0"), True, ("torch", "triton", "numba")),
        (CudaPlatform("cuda:0"), False, ("torch", "triton", "torch")),
        (HipPlatform("hip:0"), True, ("torch", "triton", "torch")),
    ],
    ids=["cpu", "cuda", "cuda without Numba", "hip"],
)
def test_each_picks_what_it_runs_best(platform: Platform, has_numba, picked, monkeypatch):
    monkeypatch.setattr("luceasync.pipeline.gpu_platform.can_launch", lambda: has_numba)
    bodies = ({"torch": ""}, {"torch": "", "triton": ""}, {"torch": "", "numba": ""})
    assert tuple(picked_body(platform, **each) for each in bodies) == picked


def test_on_a_cpu_passes_are_eager_and_nothing_is_compiled_before():
    cpu = open_platform("cpu:1")
    assert cpu.passes(eager=lambda: "eager", captured=lambda capture: "captured") == "eager"
    cpu.warm_up(lambda: pytest.fail("nothing to warm up"), 2)


def test_on_a_cpu_work_is_over_when_it_is_asked_for():
    cpu = open_platform("cpu:0")
    with cpu.on_device():
        event = cpu.record_event()
    assert event.query()
    event.synchronize()
    cpu.synchronize()
    cpu.empty_cache()


def test_a_cpu_writes_new_memory_early_and_blanks_rows_that_are_read_before_they_are_written():
    cpu, rows, touched = open_platform("cpu:0"), torch.full((2, 3), torch.nan), []
    cpu.blank(rows)
    cpu.touch(lambda: touched.append(True))
    assert touched and not rows.any()


@pytest.mark.parametrize("platform", [CudaPlatform("cuda:0"), HipPlatform("hip:0")], ids=repr)
def test_a_gpu_leaves_such_memory_alone(platform: Platform):
    rows = torch.ones(2, 3)
    platform.blank(rows)
    platform.touch(lambda: pytest.fail("the memory is there"))
    assert rows.all()


def test_copies_of_a_cpus_lanes_are_its_own():
    assert isinstance(open_platform("cpu:0").copies(None), DirectCopies)


@pytest.mark.parametrize("name", ["cpu:0", GPU])
def test_what_a_device_offers_can_be_sent(name: str):
    offer = open_platform(name).offer()
    assert offer.name == name and offer.free_bytes > 0 and "fp32" in offer.native_dtypes
    assert msgspec.json.decode(msgspec.json.encode(offer), type=Offer) == offer
    assert open_platform(name).offer(4).free_bytes < offer.free_bytes


@pytest.mark.gpu
def test_a_gpu_is_waited_for():
    gpu = open_platform("cuda:0")
    with gpu.on_device():
        torch.cuda._sleep(50_000_000)
        event = gpu.record_event()
        assert not event.query()
        event.synchronize()
        assert event.query()
        torch.cuda._sleep(50_000_000)
        event = gpu.record_event()
        gpu.synchronize()
        assert event.query()


@pytest.mark.gpu
def test_what_was_captured_is_done_again_at_each_replay():
    capture = open_platform("cuda:0").passes(eager=lambda: None, captured=lambda c: c)
    assert isinstance(capture, Capture)
    counts = torch.zeros(3, device=capture.device)
    captured = capture(lambda: counts.add_(1) * 2, num_warmups=2)
    assert counts.tolist() == [2, 2, 2]  # capturing is not running
    captured.replay()
    assert captured.output.tolist() == [6, 6, 6]
    captured.replay()
    assert captured.output.tolist() == [8, 8, 8]


# --- weights on their way to a device ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu:0", GPU])
def test_stored_rows_arrive_on_the_device_in_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_platform, "SLICE_BYTES", 1 << 20)  # twelve of them
    monkeypatch.setattr(gpu_platform, "READ_BYTES", 1 << 18)
    monkeypatch.setattr(gpu_platform, "MIN_READ_BYTES", 1 << 16)
    rows = torch.randint(0, 256, (1500, 8200), dtype=torch.uint8)  # two pieces
    (tmp_path / "rows").write_bytes(rows.numpy().tobytes())
    swapped = torch.arange(1500).view(-1, 2).flip(1).flatten()
    platform = open_platform(name)
    with closing(WeightFile(tmp_path / "rows")) as file:
        stored = StoredRows.of(file, 0, 8200, 1500).selected(lambda each: each[swapped])
        with closing(platform.row_transfer()) as transfer:
            for _ in range(3):  # buffers are used again
                pieces = [piece.clone() for piece in transfer.pieces(stored)]
                assert {piece.device for piece in pieces} == {platform.device}
                assert torch.equal(torch.cat(pieces).cpu(), rows[swapped])


@pytest.mark.parametrize("name", ["cpu:0", GPU])
@pytest.mark.parametrize("kind", sorted(ggml.ENCODINGS))
def test_blocks_become_the_same_bytes_wherever_they_are_unpacked(name: str, kind: str):
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = torch.randint(0, 256, (48, 3, block_bytes), dtype=torch.uint8)
    blocks[..., 1:4:2] &= 0xBF  # no NaN where a sign is changed: its bits are the device's own
    encoding = ggml.ENCODINGS[kind]
    there = ggml.pack(encoding, blocks.to(open_platform(name).device)).tensors
    for part, tensor in ggml.pack(encoding, blocks).tensors.items():
        found = there[part].cpu().contiguous().view(torch.uint8)
        assert torch.equal(found, tensor.contiguous().view(torch.uint8)), part
