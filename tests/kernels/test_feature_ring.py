"""The kernel of the ring of features writes the bits that torch writes."""

import pytest
import torch

from luceasync.kernels.feature_ring import gather_features
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.gpu_platform import CudaPlatform, HipPlatform
from luceasync.speculation.dflash.features import scatter_on, torch_scatter
from tests.reference import feature_ring as feature_ring_truth

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
PAIRS = [(source, target) for source in FLOATS for target in FLOATS]
EDGES = [0, 1, 0x33000000, 0x33000001, 0x387FFFFF, 0x38800000, 0x477FEFFF, 0x477FF000, 0x7F800000]


def numbers(dtype: torch.dtype, *shape: int, device: torch.device) -> torch.Tensor:
    """Any bits that are not NaN."""
    size = 1 << 8 * dtype.itemsize
    bits = torch.randint(-size // 2, size // 2, shape, generator=torch.manual_seed(1))
    found = bits.to(BITS[dtype]).view(dtype)
    return torch.where(found.isnan(), 1.0, found.float()).to(dtype).to(device)


def case(source, target, device, *, hidden=5, num_taps=2, rows=4, capacity=3):
    """Arguments of a scatter to lanes 1, none and 0: a path, padding, more rows than places."""
    taps = [numbers(source, 3, rows, hidden, device=device) for _ in range(num_taps)]
    if device.type == "cpu" and target == torch.bfloat16:  # the interpreter does not round to it
        taps = [tap.bfloat16().to(source) for tap in taps]
    indices = (
        torch.tensor([1, -1, 0], dtype=torch.int32),
        torch.tensor([2, 9, 7]),
        torch.tensor([2, 3, rows], dtype=torch.int32),
        torch.tensor(
            [[rows - 1, 0] + [-9] * (rows - 2), [-9] * rows, range(rows)], dtype=torch.int32
        ),
    )
    store = torch.full((2 * capacity + 1, num_taps * hidden), 7.0, dtype=target, device=device)
    return [taps, *(index.to(device) for index in indices), store, capacity]


def equal_after(kernel, arguments) -> bool:
    """Whether kernel and twin write and return the same bits in every row but the unused one."""
    _, lanes, _, counts, _, store, capacity = arguments
    twin = [*arguments[:5], store.clone(), capacity]
    rows, expected = kernel(*arguments), torch_scatter(*twin)
    bits = BITS[store.dtype]
    same = [torch.equal(store[:-1].view(bits), twin[5][:-1].view(bits))]
    for entry, j in feature_ring_truth.written(lanes, counts, capacity):
        same.append(torch.equal(rows[entry, j].view(bits), expected[entry, j].view(bits)))
    return all(same)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_kernel_and_twin_write_the_same_bits(source, target, device) -> None:
    assert equal_after(gather_features, case(source, target, device))


@pytest.mark.parametrize("hidden", [1, 2, 4, 6, 300])
def test_rows_of_any_width_are_copied_whole(hidden, device) -> None:
    arguments = case(torch.bfloat16, torch.bfloat16, device, hidden=hidden, num_taps=1, rows=2)
    assert equal_after(gather_features, arguments)


def test_one_kernel_serves_every_shape(device) -> None:
    kernel = gather_features
    for hidden, num_taps, rows in [(3, 1, 2), (2, 3, 2), (4, 2, 5)]:
        shape = {"hidden": hidden, "num_taps": num_taps, "rows": rows}
        assert equal_after(kernel, case(torch.float32, torch.bfloat16, device, **shape))


def test_nothing_to_write_launches_nothing(device) -> None:
    arguments = case(torch.float32, torch.float32, device)
    arguments[4] = arguments[4][:, :0].contiguous()
    before = arguments[5].clone()
    gather_features(*arguments)
    assert torch.equal(arguments[5], before)


def test_gpus_run_the_kernel_and_cpus_its_twin() -> None:
    assert scatter_on(CpuPlatform()) is torch_scatter
    assert scatter_on(CudaPlatform("cuda:0")) is scatter_on(HipPlatform("hip:0")) is gather_features


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_large_steps_agree_too(source, target, device) -> None:
    arguments = case(source, target, device, hidden=2560, num_taps=5, rows=700, capacity=512)
    assert equal_after(gather_features, arguments)


@pytest.mark.gpu
def test_a_captured_launch_follows_its_static_tensors(device) -> None:
    kernel, arguments = gather_features, case(torch.float32, torch.bfloat16, device)
    kernel(*arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = kernel(*arguments)
    for tap in arguments[0]:
        tap.copy_(torch.randn_like(tap))
    arguments[1].copy_(torch.tensor([0, 1, -1], dtype=torch.int32))
    arguments[2].add_(11)
    arguments[3].copy_(torch.tensor([1, 2, 3], dtype=torch.int32))
    arguments[4].fill_(2)
    assert equal_after(lambda *_: (graph.replay(), rows)[1], arguments)


@pytest.mark.gpu
def test_a_launch_is_ordered_by_torchs_current_stream(device) -> None:
    kernel, arguments = gather_features, case(torch.float32, torch.bfloat16, device)
    kernel(*arguments)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # the write below must come after what the stream does now
        for tap in arguments[0]:
            tap.copy_(torch.randn_like(tap))
        assert equal_after(kernel, arguments)
