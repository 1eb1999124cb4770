"""What looks cost the steps beside them, and where: in the kernel of scores, or on the bus.

    python -m scripts.bench_looks [--device cuda:0] [--programs 65536,132,66] [--small]

A pool that looks (qk) against one that never does (lru), by the most programs that the kernel of
scores is launched with. `kernel`: of a look, over keys that are on the device. `bus`: its bytes,
by a plain copy's speed.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from luceasync.bench import command
from luceasync.bench.device import at_rest, by_events
from luceasync.bench.report import median, paired_ratio
from luceasync.bench.model import Decoding
from luceasync.bench.report import NOTHING, figure, ms
from luceasync.bench.report import measure
from luceasync.bench.shapes import SHAPES
from luceasync.bench.shapes import SMALL
from luceasync.host_cache.nodes import Span
from luceasync.models.config import parse_spec
from luceasync.models.mixers.mixer import Mixer, RecentSpec
from luceasync.models.recent import LayerProbe
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.platform import open_platform
from scripts.paged.lanes import CHUNK, NUM_LANES, loaded, memory_of, node_bytes, random_tensors
from scripts.paged.lanes import taken_up as take_up

NUM_STEPS = 512  # of one sample: several looks
COPY_BYTES = 256 << 20
BLOCK_TOKENS = 32768  # that a look's keys come by in


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, device="cuda:0", rounds=3)
    parser.add_argument("--context", type=int, default=131072, help="tokens of a lane")
    parser.add_argument("--pool", type=int, default=8192, help="tokens of it that stay")
    parser.add_argument("--programs", type=command.numbers, help="default: its own")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of a sample")
    parser.add_argument("--small", action="store_true", help="a small model")
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    with torch.inference_mode():
        bench(report, options)


def bench(report: Any, options: argparse.Namespace) -> None:
    """A row for each number of programs and of lanes."""
    shape = SMALL["qwen3"] if options.small else SHAPES["qwen3-4b"]
    columns = ("lanes", "programs", "lru", "qk", "qk / lru", "looks", "a look costs", "kernel")
    table = report.table((*columns, "bus"))
    bus = seconds_of_keys(options, shape)
    with memory_of(options.device, bytes_of_lanes(options, shape)) as memory:
        backends = {
            "lru": loaded(options, shape, memory, "lru", options.context),
            "qk": loaded(options, shape, memory, "qk", options.context),
        }
        span = Span(0, options.context, with_state=True)
        tensors = random_tensors(backends["qk"], span, memory, options.device)
        for programs in options.programs or [None]:
            if programs is not None:
                limit_programs(options, programs)
            kernel = seconds_of_scores(options, shape)
            for num_lanes in (1, NUM_LANES):
                for backend in backends.values():
                    take_up(backend, tensors, span, num_lanes)
                found = steps(options, backends, num_lanes)
                table.add(num_lanes, programs or NOTHING, *found, ms(kernel), ms(bus))
        for backend in backends.values():
            for lane in range(NUM_LANES):
                backend.reset(lane)
            backend.close()
        del tensors


def bytes_of_lanes(options: argparse.Namespace, shape: Any) -> int:
    """The context, which all lanes share, and of both backends what each lane says: it is saved for
    the lane alone as it leaves, and let go when the lane begins anew.
    """
    said = NUM_LANES * (options.rounds + 1) * options.steps  # one sample to warm up
    shared, own = (node_bytes(shape, each, _dtype(options)) for each in (options.context, said))
    return shared + 2 * own


def limit_programs(options: argparse.Namespace, programs: int) -> None:
    """Where there is such a kernel."""
    if open_platform(options.device).device.type == "cuda":
        from luceasync.kernels import chunk_scores

        chunk_scores.MOST_PROGRAMS = programs


def steps(
    options: argparse.Namespace, backends: dict[str, LayerSplitBackend], num_lanes: int
) -> tuple[Any, ...]:
    """A step without looks and with them, their ratio, how many looks a sample has and what each of
    them adds.
    """

    def samples(backend: LayerSplitBackend) -> Any:
        decoding = Decoding(backend, num_lanes, options.context)

        def run() -> None:
            decoding.steps(options.steps)
            decoding.position += options.steps

        return run

    before = looks_of(backends["qk"])
    seconds = measure(
        {name: samples(backend) for name, backend in backends.items()},
        options.rounds,
        clock=at_rest,
    )
    num_samples = len(seconds["qk"]) + 1  # one to warm up
    looks = (looks_of(backends["qk"]) - before) / num_samples
    lru, qk = (median(seconds[name]) for name in ("lru", "qk"))
    return (
        ms(lru / options.steps, 3),
        ms(qk / options.steps, 3),
        figure(paired_ratio(seconds["qk"], seconds["lru"]), "", 3),
        figure(looks, "", 1),
        ms((qk - lru) / max(looks, 1)),
    )


def looks_of(backend: LayerSplitBackend) -> int:
    """Since its start, of all lanes."""
    status = backend.lanes.status
    return 0 if status is None else status.looks_total


def seconds_of_scores(options: argparse.Namespace, shape: Any) -> float:
    """All layers' scores of a context whose keys are on the device."""
    mixer, kind, num_layers = _looking(shape)
    platform = open_platform(options.device)
    body = platform.ops.pick(kind.torch_body, kind.triton_body, kind.torch_body)
    dtype = torch.float32 if options.small else torch.bfloat16
    rows = next(tensor for tensor in mixer.rows if tensor.name == kind.probed_tensor)
    block = min(BLOCK_TOKENS, options.context)
    make = {"dtype": dtype, "device": platform.device}
    keys, ring = torch.randn(block, *rows.shape, **make), torch.randn(*kind.ring.shape, **make)

    def run() -> None:
        look = LayerProbe(kind, body, range(options.context), options.context, CHUNK)
        for begin in range(0, options.context, block):
            look.probe(ring, keys, begin)
        look.mass()

    clock = by_events if platform.device.type == "cuda" else at_rest
    return num_layers * min(measure({"": run}, 5, clock=clock)[""])


def seconds_of_keys(options: argparse.Namespace, shape: Any) -> float:
    """All layers' keys of a context, copied from pinned memory."""
    mixer, kind, num_layers = _looking(shape)
    is_gpu = open_platform(options.device).device.type == "cuda"
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=is_gpu)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=open_platform(options.device).device)
    copy = {"": lambda: there.copy_(host, non_blocking=True)}
    seconds = min(measure(copy, 5, clock=by_events if is_gpu else at_rest)[""])
    rows = next(tensor for tensor in mixer.rows if tensor.name == kind.probed_tensor)
    size = torch.Size(rows.shape).numel() * (4 if options.small else 2)
    return seconds / COPY_BYTES * num_layers * options.context * size


def _looking(shape: Any) -> tuple[Mixer, RecentSpec, int]:
    """The kind of layer that looks, and how many there are."""
    mixers = [mixer for mixer in parse_spec(dict(shape)).mixers if mixer.recent is not None]
    assert mixers[0].recent is not None
    return mixers[0], mixers[0].recent, len(mixers)


def _dtype(options: argparse.Namespace) -> str:
    return "fp32" if options.small else "bf16"


if __name__ == "__main__":
    main()
