"""Decode and prefill on GPUs, of well-known shapes with random weights, beside physical limits.

    python scripts/bench_gpu.py [--shapes qwen3-4b,qwen3.5-4b] [--devices cuda:0,cuda:1] [--peer]

A decode step cannot be faster than (weights + keys and values) / copy bandwidth, prefill not faster
than a large matrix product. `--peer`: transformers' generate; several devices: beside the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from luceasync.bench import command
from luceasync.bench.device import at_rest, copy_bandwidth, matmul_rate
from luceasync.bench.figures import median, medians
from luceasync.bench.model import Decoding, load_random, plan_for, prefill, random_prompt
from luceasync.bench.report import NOTHING, Table, figure, ms, share
from luceasync.bench.rounds import measure, wall
from luceasync.bench.shapes import SHAPES, Shape, prefill_flops, step_bytes
from luceasync.models.config import parse_spec
from luceasync.pipeline.backend import LayerSplitBackend

NUM_STEPS = 55
NUM_PREFILLS = 3
NUM_PEER_TOKENS = 24


@dataclass(frozen=True)
class Rates:
    """What the device can do at best."""

    copy_bytes_per_s: float  # read and written
    matmul_flops: float


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__)
    parser.add_argument("--shapes", type=command.names, default="qwen3-4b,qwen3.5-4b")
    parser.add_argument("--devices", type=command.names, default="cuda:0")
    parser.add_argument("--contexts", type=command.numbers, default="1024")
    parser.add_argument("--lanes", type=command.numbers, default="1,4")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    devices = options.devices
    report = command.begin(options, devices)
    rates = Rates(copy_bandwidth(devices[0]), matmul_rate(devices[0]))
    table = report.table(("shape", "devices", "what", "figure", "limit", "share"))
    bandwidth = figure(rates.copy_bytes_per_s / 1e9, "GB/s")
    table.add("-", devices[0], "copy bandwidth", bandwidth, NOTHING, NOTHING)
    product = figure(rates.matmul_flops / 1e12, "TFLOP/s")
    table.add("-", devices[0], "bf16 matrix product", product, NOTHING, NOTHING)
    for name in options.shapes:
        for chain in [devices[:1], devices] if len(devices) > 1 else [devices]:
            measure_ours(table, name, chain, rates, options)
        if options.peer:
            context = options.contexts[0]
            what = f"transformers decode, 1 sequence at {context}"
            step = ms(peer_step_s(name, context), 2)
            table.add(name, "cuda:0", what, step, NOTHING, NOTHING)


def measure_ours(
    table: Table, name: str, chain: Sequence[str], rates: Rates, options: argparse.Namespace
) -> None:
    """Decode at each number of lanes and context, and prefill, through the real backend."""
    shape, longest = SHAPES[name], max(*options.contexts, options.prompt)
    plan = plan_for(shape, chain, parallel=max(options.lanes), max_ctx_tokens=longest + 256)
    loaded: list[LayerSplitBackend] = []
    load_s = wall(lambda: loaded.append(load_random(shape, plan)))
    [backend] = loaded
    who = (name, ",".join(chain))
    table.add(*who, "load and capture", figure(load_s, "s"), NOTHING, NOTHING)
    prompt = random_prompt(longest)
    for context in options.contexts:
        for lane in range(max(options.lanes)):
            prefill(backend, lane, prompt[:context])
        limits = {n: step_bytes(shape, plan, n, context) for n in options.lanes}
        steps = {str(n): Decoding(backend, n, context) for n in options.lanes}
        for lanes, step_s in medians(measure(steps, NUM_STEPS, num_warmups=5)).items():
            limit_s = limits[int(lanes)] / rates.copy_bytes_per_s
            what = f"decode, {lanes} lanes at {context}"
            table.add(*who, what, ms(step_s, 2), ms(limit_s, 2), share(limit_s / step_s))
    add_prefill(
        table, who, backend, shape, prompt[: options.prompt], rates.matmul_flops * len(chain)
    )
    backend.close()


def add_prefill(
    table: Table,
    who: tuple[str, str],
    backend: LayerSplitBackend,
    shape: Shape,
    prompt: Sequence[int],
    limit: float,
) -> None:
    """Milliseconds of a prompt, and its operations per second beside `limit`."""
    runs = {"prefill": lambda: prefill(backend, 0, prompt)}
    seconds = median(measure(runs, NUM_PREFILLS)["prefill"])
    rate = prefill_flops(shape, parse_spec(dict(shape)).num_parameters, len(prompt)) / seconds
    what = f"prefill of {len(prompt)}"
    table.add(*who, what, ms(seconds, 2), NOTHING, NOTHING)
    flops = figure(rate / 1e12, "TFLOP/s"), figure(limit / 1e12, "TFLOP/s")
    table.add(*who, what, *flops, share(rate / limit))


def peer_step_s(shape: str, context: int) -> float:
    """Seconds of a decode step of transformers' generate on random weights of the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(10, 100_000, (1, context), device="cuda")
    seconds = []
    for num_tokens in (1, 1, 1 + NUM_PEER_TOKENS):
        with torch.inference_mode():
            seconds.append(at_rest(lambda n=num_tokens: generate(model, prompt, n)))
    return (seconds[2] - seconds[1]) / NUM_PEER_TOKENS


def generate(model: torch.nn.Module, prompt: torch.Tensor, num_tokens: int) -> None:
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    )


if __name__ == "__main__":
    main()
