"""Lanes with fewer pages than their context, against lanes that hold all of it, in one run.

    python -m scripts.bench_kvflash [--device cuda:0] [--parts moves,chunk,decode] [--small]

`moves`: chunks to and from shuffled pages, beside a plain copy. `chunk`: of a prompt, behind a long
context. `decode`: while nothing moves (lru), and with looks (qk). --small: what a CPU runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from luceasync.bench import command
from luceasync.bench.device import at_rest, by_events
from luceasync.bench.report import median, paired_ratio
from luceasync.bench.model import Decoding, random_prompt
from luceasync.bench.report import NOTHING, Report, figure, ms, share
from luceasync.bench.report import Run, measure
from luceasync.bench.shapes import SHAPES
from luceasync.bench.shapes import SMALL
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copies import rows_in
from luceasync.host_cache.nodes import Span
from luceasync.kv.cache import LaneCache, total_bytes
from luceasync.models.config import parse_spec
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capacity import Policy
from luceasync.pipeline.platform import open_platform
from scripts.paged.lanes import (
    CHUNK,
    NODE,
    NUM_LANES,
    TAU,
    loaded,
    memory_of,
    node_bytes,
    random_tensors,
    taken_up,
)

NUM_STEPS = 2 * TAU  # of one sample
NUM_QUEUED = 8
# The first layers of a large model: each costs what it costs there.
QUARTER = SHAPES["qwen3.5-27b"] | {"num_hidden_layers": 16}


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, device="cuda:0", rounds=5)
    parser.add_argument("--parts", type=command.names, default="moves,chunk,decode")
    parser.add_argument("--context", type=int, default=131072, help="tokens of a lane")
    parser.add_argument("--pool", type=int, default=8192, help="tokens of it that stay")
    parser.add_argument("--small", action="store_true", help="a small model")
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    with torch.inference_mode():
        if "moves" in options.parts:
            bench_moves(report, options)
        if "chunk" in options.parts:
            names = {"small": SMALL["qwen3_5"]} if options.small else {"27B, 16 layers": QUARTER}
            bench_chunk(report, options, names)
        if "decode" in options.parts:
            bench_decode(report, options)


# --- chunks between host memory and pages ---------------------------------------------------------


def bench_moves(report: Report, options: argparse.Namespace) -> None:
    """Through the copies that a lane's pages are moved with."""
    shape = SMALL["qwen3"] if options.small else SHAPES["qwen3.5-27b"]
    counts = (4, 8) if options.small else (16, 120)
    table = report.table(("chunks", "in", "of a copy", "out", "of a copy ", "copy in", "copy out"))
    platform = open_platform(options.device)
    mixers = [mixer for mixer in parse_spec(dict(shape)).mixers if mixer.rows]
    dtype = torch.float32 if options.small else torch.bfloat16
    cache = LaneCache(
        mixers,
        num_lanes=1,
        num_pages=max(counts),
        dtype_of=lambda role: dtype,
        device=platform.device,
    )
    token_bytes = total_bytes(cache.row_shapes(1).values())
    with memory_of(options.device, 3 * max(counts) * CHUNK * token_bytes) as memory:
        for count in counts:
            report_moves(table, options, cache, memory, count * CHUNK)


def report_moves(
    table: Any, options: argparse.Namespace, cache: LaneCache, memory: HostMemory, num_tokens: int
) -> None:
    """One row of the table."""
    platform = open_platform(options.device)
    copies = platform.copies(cache)
    shapes = cache.row_shapes(num_tokens)
    num_bytes = total_bytes(shapes.values())
    region, other = (memory.allocate(num_bytes) for _ in range(2))
    for part in (region, other):
        torch.frombuffer(part, dtype=torch.uint8).fill_(1)
    order = torch.randperm(num_tokens // CHUNK).tolist()
    runs = [range(page * CHUNK, (page + 1) * CHUNK) for page in order]
    at = [*range(0, num_tokens, CHUNK)]
    rows = rows_in(region, shapes, runs, at)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=platform.device.index is not None)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=platform.device)

    def page_in() -> None:
        copies.page_in(0, rows)
        copies.listed(0)  # what comes next on the device waits, and nobody else

    def page_out() -> None:
        copies.save(0, runs, other, None, 0, at)
        copies.freed(0)

    seconds = measure(
        {
            "in": queued(page_in),
            "out": queued(page_out),
            "copy in": queued(lambda: there.copy_(pinned, non_blocking=True)),
            "copy out": queued(lambda: pinned.copy_(there, non_blocking=True)),
        },
        options.rounds,
        clock=by_events if platform.device.index is not None else at_rest,
    )
    moved_bytes = NUM_QUEUED * num_bytes
    rate = {name: moved_bytes / median(taken) / 1e9 for name, taken in seconds.items()}
    table.add(
        num_tokens // CHUNK,
        figure(rate["in"], "GB/s", 1),
        share(rate["in"] / rate["copy in"]),
        figure(rate["out"], "GB/s", 1),
        share(rate["out"] / rate["copy out"]),
        figure(rate["copy in"], "GB/s", 1),
        figure(rate["copy out"], "GB/s", 1),
    )
    copies.close()
    assert torch.frombuffer(region, dtype=torch.uint8).equal(
        torch.frombuffer(other, dtype=torch.uint8)
    ), "what came in did not go out"


def queued(move: Run) -> Run:
    """Moves one after the other, none waited for."""

    def run() -> None:
        for _ in range(NUM_QUEUED):
            move()

    return run


# --- a chunk behind a long context ----------------------------------------------------------------


def bench_chunk(
    report: Report, options: argparse.Namespace, shapes: Mapping[str, Mapping[str, Any]]
) -> None:
    """A chunk of a prompt, paged and not, one after the other."""
    table = report.table(("chunk of", "all here", "paged", "ratio", "distance of logits"))
    dtype = "fp32" if options.small else "bf16"
    for name, shape in shapes.items():
        with memory_of(options.device, node_bytes(shape, options.context, dtype)) as memory:
            backends = {
                "all here": loaded(options, shape, memory, None, options.context),
                "paged": loaded(options, shape, memory, "lru", options.context),
            }
            num_rows = min(each.plan.prefill_chunk_tokens for each in backends.values())
            span = Span(0, options.context - num_rows, with_state=True)
            tensors = random_tensors(backends["paged"], span, memory, options.device)
            for backend in backends.values():
                taken_up(backend, tensors, span, 1)
            tokens = random_prompt(num_rows)
            logits = [
                backend.prefill(0, span.end, tokens, project=True).clone()
                for backend in backends.values()
            ]
            seconds = measure(
                {name: prefill_of(backend, span, tokens) for name, backend in backends.items()},
                options.rounds,
                clock=at_rest,
            )
            table.add(
                f"{num_rows} at {options.context}, {name}",
                ms(median(seconds["all here"])),
                ms(median(seconds["paged"])),
                figure(paired_ratio(seconds["paged"], seconds["all here"]), "", 3),
                figure(float((logits[0] - logits[1]).norm() / logits[0].norm()), "", 5),
            )
            for backend in backends.values():
                backend.close()
            del tensors, backends, backend, logits


def prefill_of(backend: LayerSplitBackend, span: Span, tokens: Sequence[int]) -> Any:
    """The same chunk again: its rows are written anew."""
    return lambda: backend.prefill(0, span.end, tokens, project=False)


# --- decode steps ---------------------------------------------------------------------------------


def bench_decode(report: Report, options: argparse.Namespace) -> None:
    """Steps at a long context, and at one that the pool holds."""
    shape = SMALL["qwen3"] if options.small else SHAPES["qwen3-4b"]
    dtype = "fp32" if options.small else "bf16"
    num_tokens = options.context + options.pool  # of both contexts' nodes
    with memory_of(options.device, node_bytes(shape, num_tokens, dtype)) as memory:
        policies: dict[str, Policy | None] = {"all here": None, "lru": "lru", "qk": "qk"}
        backends = {
            name: loaded(options, shape, memory, policy, options.context)
            for name, policy in policies.items()
        }
        columns = ("step", *backends, "faster", "qk / lru", "lane bytes paged / all")
        columns += ("looks", "recalled")
        table = report.table(columns)
        short = options.pool // 2
        for context in (options.context, short):
            span = Span(0, context, with_state=True)
            tensors = random_tensors(backends["qk"], span, memory, options.device)
            for num_lanes in (1, NUM_LANES):
                for backend in backends.values():
                    taken_up(backend, tensors, span, num_lanes)
                report_steps(table, options, backends, num_lanes, context)
            for backend in backends.values():
                for lane in range(NUM_LANES):
                    backend.reset(lane)
                backend.nodes.drop(NODE)
            del tensors
        for backend in backends.values():
            backend.close()


def report_steps(
    table: Any,
    options: argparse.Namespace,
    backends: Mapping[str, LayerSplitBackend],
    num_lanes: int,
    context: int,
) -> None:
    """One row of the table; lanes go on from sample to sample."""

    def samples(backend: LayerSplitBackend) -> Any:
        decoding = Decoding(backend, num_lanes, context)

        def run() -> None:
            decoding.steps(NUM_STEPS)
            decoding.position += NUM_STEPS

        return run

    seconds = measure(
        {name: samples(backend) for name, backend in backends.items()},
        options.rounds,
        clock=at_rest,
    )
    told = [backends["qk"].lanes.told(lane) for lane in range(num_lanes)]
    counts = [each for each in told if each is not None]
    lru, looks = (paired_ratio(seconds[name], seconds["all here"]) for name in ("lru", "qk"))
    pages = [backends[name].plan.num_pages for name in ("lru", "all here")]
    table.add(
        f"{num_lanes} lanes at {context}",
        *(ms(median(taken) / NUM_STEPS, 3) for taken in seconds.values()),
        figure(1 / lru, "", 2),
        figure(looks / lru, "", 3),
        share(pages[0] / pages[1]) if context == options.context else NOTHING,
        sum(each.looks for each in counts),
        sum(each.recalled for each in counts),
    )


if __name__ == "__main__":
    main()
