"""Decode steps and prefill of two random 4B models on one GPU, against what the memory allows.

    python scripts/bench_kernels.py [--shapes qwen3-4b,qwen3.5-4b] [--profile] [--no-overlap]

Limit of a decode step = (bytes of the weights + bytes of the lanes' state) / copy bandwidth.
`queued`: steps none of which is waited for, so that the host is no part of their time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from luceasync.bench import command
from luceasync.bench.device import by_events, copy_bandwidth, matmul_rate
from luceasync.bench.figures import median
from luceasync.bench.model import load_random, plan_for, prefill, random_prompt
from luceasync.bench.report import Report, figure, ms, share
from luceasync.bench.rounds import measure
from luceasync.bench.shapes import SHAPES, prefill_flops, state_bytes, step_bytes
from luceasync.kernels import overlap
from luceasync.models.config import parse_spec
from luceasync.pipeline.backend import LayerSplitBackend

NUM_LANES = 16
CONTEXT_TOKENS = 33 * 1024
PROMPT_TOKENS = 8192
DECODES = ((1, 1024), (4, 1024), (16, 1024), (1, 32768))  # lanes, context
NUM_STEPS, NUM_QUEUED, NUM_PREFILLS = 50, 10, 5


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, device="cuda:0")
    parser.add_argument("--shapes", type=command.names, default="qwen3-4b,qwen3.5-4b")
    parser.add_argument("--profile", action="store_true", help="also list the kernels")
    parser.add_argument("--no-overlap", action="store_true", help="launch kernel after kernel")
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    if options.no_overlap:
        overlap.can_overlap = lambda device_index: False
    for name in options.shapes:
        bench_model(report, name, options)
        torch.cuda.empty_cache()


@torch.inference_mode()
def bench_model(report: Report, name: str, options: argparse.Namespace) -> None:
    """One model's figures."""
    shape = SHAPES[name]
    num_parameters = parse_spec(dict(shape)).num_parameters
    plan = plan_for(shape, [options.device], parallel=NUM_LANES, max_ctx_tokens=CONTEXT_TOKENS)
    copy_bytes_per_s = copy_bandwidth(options.device)
    backend = load_random(shape, plan)
    report.say(f"\n{name}: {num_parameters / 1e9:.2f}G parameters")
    table = report.table(
        ("decode", "step", "queued", "limit", "limit / step", "limit / queued", "same bits alone"),
        name,
    )
    prompt = random_prompt(CONTEXT_TOKENS)
    for num_lanes, context in DECODES:
        fill(backend, num_lanes, prompt[:context])
        step = step_of(backend, num_lanes, context)
        step_s = median(measure({"": step}, NUM_STEPS, num_warmups=3, clock=by_events)[""])
        many = measure({"": queued(step)}, NUM_STEPS // NUM_QUEUED, clock=by_events)
        queued_s = median(many[""]) / NUM_QUEUED
        num_bytes = step_bytes(shape, plan, num_lanes, context) + state_bytes(plan, num_lanes)
        limit_s = num_bytes / copy_bytes_per_s
        times = ms(step_s, 3), ms(queued_s, 3), ms(limit_s, 3)
        shares = share(limit_s / step_s), share(limit_s / queued_s)
        same = str(is_same_alone(backend, num_lanes, prompt[:context]))
        table.add(f"{num_lanes} lanes at {context}", *times, *shares, same)
        if options.profile and num_lanes == 1:
            print_kernels(step, 5)
    runs = {"": lambda: prefill(backend, 0, prompt[:PROMPT_TOKENS])}
    seconds = median(measure(runs, NUM_PREFILLS)[""])
    rate = prefill_flops(shape, num_parameters, PROMPT_TOKENS) / seconds
    flops = figure(rate / 1e12, "TFLOP/s", 0), share(rate / matmul_rate(options.device))
    speed = figure(PROMPT_TOKENS / seconds, "tokens/s", 0)
    table = report.table(("prefill", "time", "rate", "operations", "of the matmul rate"), name)
    table.add(f"{PROMPT_TOKENS} tokens", ms(seconds), speed, *flops)
    if options.profile:
        print_kernels(runs[""], 1)
    backend.close()


def fill(backend: LayerSplitBackend, num_lanes: int, prompt: Sequence[int]) -> None:
    """Make the lanes stand after the prompt."""
    for lane in range(num_lanes):
        prefill(backend, lane, prompt)


def step_of(backend: LayerSplitBackend, num_lanes: int, context: int) -> Callable[[], torch.Tensor]:
    """A decode step whose tokens stay on the device."""
    lanes = list(range(num_lanes))
    return lambda: backend.decode(lanes, [context] * num_lanes, [1] * num_lanes).whole()


def queued(step: Callable[[], object]) -> Callable[[], None]:
    """Steps one after the other, none waited for."""

    def run() -> None:
        for _ in range(NUM_QUEUED):
            step()

    return run


def is_same_alone(backend: LayerSplitBackend, num_lanes: int, prompt: Sequence[int]) -> bool:
    """Whether the first lane's logits do not depend on the other lanes."""
    fill(backend, num_lanes, prompt)  # recurrent states move with every step
    together = step_of(backend, num_lanes, len(prompt))()[:1].clone()
    fill(backend, 1, prompt)
    return torch.equal(together, step_of(backend, 1, len(prompt))())


def print_kernels(run: Callable[[], object], repeats: int) -> None:
    """Device time of each kernel; where launches overlap, waiting counts too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in events[:14]:
        total = event.self_device_time_total / repeats / 1e3
        count = event.count / repeats
        print(f"    {total:8.3f} ms {count:6.0f} x {total / count * 1e3:8.1f} us  {event.key[:70]}")


if __name__ == "__main__":
    main()
