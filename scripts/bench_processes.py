"""A model over two devices: both in one process, beside one of them in a process of its own.

    python scripts/bench_processes.py [--devices cuda:0,cuda:1] [--shapes qwen3.5-27b,qwen3-4b]
    python scripts/bench_processes.py --devices cpu:0,cpu:1 --shapes small --prompt-tokens 512

Random weights, the same layers on each device, in turns; above 1.00 two processes are the faster. A
hop goes from the first device to the second one in another process and back; chunks go one way.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from processes.models import PARALLEL, decode_s, in_two, opened, prefill_s
from processes.on_devices import chunks_rate, echo_end, hop_of, pinned_rate, synchronize_on

from luceasync.bench import command
from luceasync.bench.figures import median, paired_ratio, percentile
from luceasync.bench.model import plan_for, random_prompt
from luceasync.bench.random_weights import know_it, write_model
from luceasync.bench.report import Report, figure, ms
from luceasync.bench.rounds import interleave
from luceasync.bench.shapes import SHAPES, Shape
from luceasync.bench.small import SMALL
from luceasync.models.precision import Dtype
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import pinned_by
from luceasync.pipeline.platform import open_platform

APART_S = 8e-3  # of hops between steps: half a step of a large model


def compare(
    report: Report, name: str, shape: Shape, devices: Sequence[str], options: argparse.Namespace
) -> None:
    """One process and two, in turns."""
    dtype: Dtype = options.dtype
    plan = plan_for(
        shape,
        devices,
        parallel=PARALLEL,
        max_ctx_tokens=options.prompt_tokens + 256,
        dtype=dtype,
    )
    if plan.suits_one_thread:  # as the engine runs it
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as there, ExitStack() as closing:
        folder = Path(there)
        write_model(folder, shape, dtype)
        backends = {
            "one": closing.enter_context(opened(folder, plan)),
            "two": closing.enter_context(opened(folder, in_two(plan))),
        }
        cases: dict[str, Callable[[LayerSplitBackend], float]] = {
            "decode, 1 lane": lambda b: decode_s(b, 1, options.context, options.steps),
            "decode, 4 lanes": lambda b: decode_s(b, PARALLEL, options.context, options.steps),
            f"prefill, {options.prompt_tokens} tokens": lambda b: prefill_s(
                b, options.prompt_tokens
            ),
        }
        columns = ("shape", "what", "one process", "two processes", "one / two", "more a step")
        table = report.table(columns, "one process and two")
        for backend in backends.values():
            for lane in range(PARALLEL):
                backend.prefill(lane, 0, random_prompt(options.context, lane), project=False)
        for what, run in cases.items():
            variants = {name: lambda b=b, run=run: run(b) for name, b in backends.items()}
            rounds = options.rounds if "decode" in what else max(3, options.rounds // 2)
            found = interleave(variants, rounds, num_warmups=2)
            one, two = (median(found[each]) for each in ("one", "two"))
            ratio = paired_ratio(found["one"], found["two"])
            table.add(name, what, ms(one, 3), ms(two, 3), figure(ratio, digits=3), ms(two - one, 3))


def compare_copies(report: Report, devices: Sequence[str], options: argparse.Namespace) -> None:
    """Hops and chunks between the first two devices, in two processes."""
    place = open_platform(devices[0]).device
    with echo_end(devices[1]) as started:
        started.channel.register(pinned_by([devices[0]]))
        started.channel.keep_awake()
        hop = hop_of(started, place)
        table = report.table(("when", "p50", "p99"), "a hop there and back, device to device")
        busy = torch.randn(2048, 2048, device=place)
        for when, apart_s in (("back to back", 0.0), ("between steps", APART_S)):
            found = []
            for _ in range(20 + options.hops):
                found.append(hop())
                until = time.perf_counter() + apart_s
                while time.perf_counter() < until:
                    busy @ busy  # a device that rests is slow to begin
                    synchronize_on(place)
            p50, p99 = (percentile(found[20:], each) * 1e6 for each in (50, 99))
            table.add(when, figure(p50, "us", 0), figure(p99, "us", 0))
        rates = interleave(
            {
                "chunks": lambda: chunks_rate(started, place, options.chunks),
                "pinned": lambda: pinned_rate(place, options.chunks),
            },
            options.rounds,
        )
        chunks = report.table(("what", "GB/s", "of a pinned copy"), "chunks of 20 MiB, one way")
        for name, values in rates.items():
            share = paired_ratio(values, rates["pinned"])
            chunks.add(name, figure(median(values) / 1e9, digits=1), figure(share))


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=7)
    parser.add_argument("--devices", type=command.names, default=["cuda:0", "cuda:1"])
    parser.add_argument("--shapes", type=command.names, default=["qwen3.5-27b", "qwen3-4b"])
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step")
    parser.add_argument("--steps", type=int, default=16, help="of decoding, in one sample")
    parser.add_argument("--hops", type=int, default=300, help="0: neither hops nor chunks")
    parser.add_argument("--chunks", type=int, default=40)
    options = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    report = command.begin(options, options.devices)
    know_it()
    shapes = {**SHAPES, "small": SMALL["qwen3_5"]}
    with torch.inference_mode():
        if options.hops:
            compare_copies(report, options.devices, options)
        for name in options.shapes:
            compare(report, name, shapes[name], options.devices, options)


if __name__ == "__main__":
    main()
