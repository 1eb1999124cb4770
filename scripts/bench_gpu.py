"""Decode and prefill on GPUs, of well-known shapes with random weights, beside physical limits.

    python scripts/bench_gpu.py [--shapes qwen3-4b,qwen3.5-4b] [--devices cuda:0,cuda:1] [--peer]

A decode step cannot be faster than (weights + keys and values) / copy bandwidth, prefill not faster
than a large matrix product. `--peer`: transformers' generate; several devices: beside the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from luceasync.models.config import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.plan import make_plan

QWEN3_5_COMMON = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "qwen3.5-4b": QWEN3_5_COMMON
    | {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3.5-27b": QWEN3_5_COMMON
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    },
}
NUM_STEPS = 60
NUM_PEER_TOKENS = 24


@dataclass(frozen=True)
class Figure:
    """One measurement; `limit` and `share` are None where there is no physical limit to compare."""

    shape: str
    devices: str
    what: str
    value: float
    unit: str
    limit: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Rates:
    """What the device can do at best."""

    copy_bytes_per_s: float  # read and written
    matmul_flops: float


def main() -> None:
    """Measure and print; `--out` keeps the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="qwen3-4b,qwen3.5-4b")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--contexts", default="1024")
    parser.add_argument("--lanes", default="1,4")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    devices = options.devices.split(",")
    rates = measure_rates()
    figures = [
        Figure("-", devices[0], "copy bandwidth", rates.copy_bytes_per_s / 1e9, "GB/s"),
        Figure("-", devices[0], "bf16 matrix product", rates.matmul_flops / 1e12, "TFLOP/s"),
    ]
    chains = [devices[:1], devices] if len(devices) > 1 else [devices]
    for shape in options.shapes.split(","):
        for chain in chains:
            figures += measure_ours(shape, chain, rates, options)
            show(figures)
        if options.peer:
            figures.append(measure_peer(shape, max(map(int, options.contexts.split(",")[:1]))))
    show(figures)
    if options.out:
        options.out.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


def measure_rates() -> Rates:
    """A copy of 4 GiB and a bf16 product of 8192^3, medians."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copy_s = timed(lambda: target.copy_(source), 10)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_s = timed(lambda: a @ b, 20)
    return Rates(2 * source.numel() * 4 / copy_s, 2 * 8192**3 / matmul_s)


def timed(run: Callable[[], object], num_runs: int) -> float:
    """Median seconds of one run, by events, after two to warm up."""
    seconds = []
    for i in range(num_runs + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i >= 2:
            seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def measure_ours(
    shape: str, chain: Sequence[str], rates: Rates, options: argparse.Namespace
) -> list[Figure]:
    """Decode at each number of lanes and context, and prefill, through the real backend."""
    spec = parse_spec(SHAPES[shape])
    contexts = [int(text) for text in options.contexts.split(",")]
    num_lanes = [int(text) for text in options.lanes.split(",")]
    plan = make_plan(
        spec,
        find_devices(chain),
        dtype="bf16",
        weights=[1.0] * len(chain),
        parallel=max(num_lanes),
        max_ctx_tokens=max(*contexts, options.prompt) + 256,
        prefill_chunk_tokens=None,
    )
    name = ",".join(chain)
    started = time.perf_counter()
    source = RandomSource(torch.bfloat16, torch.device("cuda"))
    backend = LayerSplitBackend.load(spec, plan, source)
    figures = [Figure(shape, name, "load and capture", time.perf_counter() - started, "s")]
    prompt = torch.randint(10, spec.vocab_size - 10, (max(*contexts, options.prompt),)).tolist()
    for context in contexts:
        for lane in range(max(num_lanes)):
            prefill(backend, lane, prompt[:context])
        for lanes in num_lanes:
            step_s = decode_step_s(backend, lanes, context)
            limit_s = bytes_read(spec, plan.shards, lanes, context) / rates.copy_bytes_per_s
            what = f"decode, {lanes} lanes at {context}"
            figures.append(
                Figure(shape, name, what, step_s * 1e3, "ms", limit_s * 1e3, limit_s / step_s)
            )
    prefill(backend, 0, prompt[: options.prompt])
    prefill_s = statistics.median(prefill(backend, 0, prompt[: options.prompt]) for _ in range(3))
    rate = prefill_flops(spec, options.prompt) / prefill_s
    what = f"prefill of {options.prompt}"
    figures.append(Figure(shape, name, what, prefill_s * 1e3, "ms"))
    limit = rates.matmul_flops * len(chain)
    figures.append(Figure(shape, name, what, rate / 1e12, "TFLOP/s", limit / 1e12, rate / limit))
    backend.close()
    return figures


def prefill(backend: LayerSplitBackend, lane: int, prompt: Sequence[int]) -> float:
    """Run the prompt on the lane, chunk by chunk; seconds until its logits are there."""
    backend.reset(lane)
    torch.cuda.synchronize()
    started = time.perf_counter()
    chunk = backend.plan.prefill_chunk_tokens
    for begin in range(0, len(prompt), chunk):
        end = min(begin + chunk, len(prompt))
        logits = backend.prefill(lane, begin, prompt[begin:end], project=end == len(prompt))
    assert logits is not None
    logits.argmax().item()
    return time.perf_counter() - started


def decode_step_s(backend: LayerSplitBackend, num_lanes: int, context: int) -> float:
    """Median seconds of a greedy step as the engine runs it: the chosen tokens come to the host."""
    lanes, tokens, seconds = list(range(num_lanes)), [1] * num_lanes, []
    for position in range(context, context + NUM_STEPS):
        started = time.perf_counter()
        tokens = backend.decode(lanes, [position] * num_lanes, tokens).argmax(-1).tolist()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[5:])


def bytes_read(spec: ModelSpec, shards: Sequence[Any], num_lanes: int, context: int) -> int:
    """Bytes that a decode step cannot avoid: every weight once (of an untied embedding only rows)
    and the keys and values of every lane."""
    weights = sum(shard.weight_bytes for shard in shards)
    tables = 1 if spec.tied_embeddings else 2
    held = tables if len(shards) == 1 or not spec.tied_embeddings else 2
    weights -= (held - 1) * spec.vocab_size * spec.hidden_size * 2
    return weights + num_lanes * context * sum(shard.token_bytes for shard in shards)


def prefill_flops(spec: ModelSpec, num_tokens: int) -> float:
    """Matrix products of every layer and causal attention; the head runs for one row only."""
    layers = sum(spec.num_layer_parameters(layer) for layer in range(spec.num_layers))
    attention = spec.layer_types.count("attention") * 2 * num_tokens**2 * spec.attention.query_dim
    return 2.0 * layers * num_tokens + attention


def measure_peer(shape: str, context: int) -> Figure:
    """Decode step of transformers' generate on random weights of the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(10, 100_000, (1, context), device="cuda")
    seconds = []
    for num_tokens in (1, 1, 1 + NUM_PEER_TOKENS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    step_ms = (seconds[2] - seconds[1]) / NUM_PEER_TOKENS * 1e3
    return Figure(shape, "cuda:0", f"transformers decode, 1 sequence at {context}", step_ms, "ms")


def show(figures: Sequence[Figure]) -> None:
    table = Table("shape", "devices", "what", "figure", "limit", "share")
    for f in figures:
        limit = "" if f.limit is None else f"{f.limit:.2f}"
        share = "" if f.share is None else f"{f.share:.0%}"
        table.add_row(f.shape, f.devices, f.what, f"{f.value:.2f} {f.unit}", limit, share)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
