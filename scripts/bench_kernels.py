"""Decode steps and prefill of two random 4B models on one GPU, against what the memory allows.

    python scripts/bench_kernels.py [--models qwen3 qwen3_5] [--profile] [--no-overlap]

Limit of a decode step = (bytes of the weights + bytes of the lanes' state) / copy bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from luceasync.hoststore.memory import PlainMemory
from luceasync.kernels import overlap
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.models.config import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.graph import GraphedShard
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.platform import open_platform
from luceasync.pipeline.shard import Shard

COPY_BYTES_PER_S = 4.24e12
MATMUL_FLOPS = 790e12
NUM_LANES = 16
CONTEXT_TOKENS = 33 * 1024
PROMPT_TOKENS = 8192
CHUNK = 2048  # prompt rows of one forward pass

QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
QWEN35_4B = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "tie_word_embeddings": True,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
MODELS = {"qwen3": QWEN3_4B, "qwen3_5": QWEN35_4B}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--profile", action="store_true", help="also list the kernels")
    parser.add_argument("--no-overlap", action="store_true", help="launch kernel after kernel")
    options = parser.parse_args()
    if options.no_overlap:
        overlap._can_overlap = lambda device_index: False
    for name in options.models:
        bench_model(name, parse_spec(MODELS[name]), options.profile)
        torch.cuda.empty_cache()


@torch.inference_mode()
def bench_model(name: str, spec: ModelSpec, profile: bool) -> None:
    """Print one model's figures."""
    device = torch.device("cuda", 0)
    plan = make_plan(
        spec,
        [offer_of("cuda:0", 130 * 2**30)],
        dtype="bf16",
        weights=None,
        parallel=NUM_LANES,
        max_ctx_tokens=CONTEXT_TOKENS,
        prefill_chunk_tokens=CHUNK,
    )
    source = RandomSource(torch.bfloat16, device)
    [shard_plan], platform = plan.shards, open_platform("cuda:0")
    shard = Shard(spec, plan, shard_plan, platform, source, lambda num_bytes: None, PlainMemory())
    for kind, (first, second) in zip(spec.layer_types, shard.cache.layers, strict=True):
        if kind == "attention":
            first.normal_()
            second.normal_()
    graphs = GraphedShard(shard, Capture(shard.device), plan, spec)
    print(f"\n{name}: {spec.num_parameters / 1e9:.2f}G parameters")
    for num_lanes, position in ((1, 1024), (4, 1024), (16, 1024), (1, 32768)):
        bench_decode(spec, shard, graphs, num_lanes, position, profile and num_lanes == 1)
    bench_prefill(spec, shard, profile)
    graphs.close()
    shard.close()


def bench_decode(
    spec: ModelSpec,
    shard: Shard,
    graphs: GraphedShard,
    num_lanes: int,
    position: int,
    profile: bool,
) -> None:
    """One step of `num_lanes` lanes at `position`, as the engine takes it."""
    batch = Batch(tuple(range(num_lanes)), (position,) * num_lanes, 1)
    tokens = torch.ones(num_lanes, 1, dtype=torch.int64, device=shard.device)

    def step() -> None:
        graphs.decode(batch, tokens)

    seconds = median_seconds(step, 50)
    replay = median_seconds(graphs._steps[num_lanes, 0].captured.replay, 50)
    limit = step_bytes(spec, num_lanes, position) / COPY_BYTES_PER_S
    clear_states(spec, shard)
    together = graphs.decode(batch, tokens)[:1].clone()
    clear_states(spec, shard)
    alone = graphs.decode(Batch((0,), (position,), 1), tokens[:1])
    print(
        f"decode {num_lanes:2d} lanes at {position:5d}: {seconds * 1e3:6.3f} ms, graph alone "
        f"{replay * 1e3:6.3f}, limit {limit * 1e3:6.3f}: {limit / seconds:6.1%}, "
        f"graph {limit / replay:6.1%}; same bits alone: {torch.equal(together, alone)}",
        flush=True,
    )
    if profile:
        print_kernels(step, 5)


def clear_states(spec: ModelSpec, shard: Shard) -> None:
    """Recurrent states move with every step; the same step twice needs them back."""
    for kind, pair in zip(spec.layer_types, shard.cache.layers, strict=True):
        if kind == "delta":
            for state in pair:
                state.zero_()


def bench_prefill(spec: ModelSpec, shard: Shard, profile: bool) -> None:
    """A prompt, chunk by chunk, on one lane."""
    tokens = torch.ones(1, CHUNK, dtype=torch.int64, device=shard.device)

    def prompt() -> None:
        for begin in range(0, PROMPT_TOKENS, CHUNK):
            shard.forward(shard.embed(tokens), shard.rows(Batch((0,), (begin,), CHUNK)))

    seconds = median_seconds(prompt, 5)
    rate = prefill_flops(spec) / seconds
    print(
        f"prefill {PROMPT_TOKENS} tokens: {seconds * 1e3:.1f} ms, "
        f"{PROMPT_TOKENS / seconds:.0f} tokens/s, {rate / 1e12:.0f} TFLOP/s, "
        f"{rate / MATMUL_FLOPS:.1%} of the matmul rate",
        flush=True,
    )
    if profile:
        print_kernels(prompt, 1)


def step_bytes(spec: ModelSpec, num_lanes: int, position: int) -> float:
    """Weights once, keys and values of each lane, recurrent state in and out."""
    attention, delta = spec.attention, spec.delta
    num_attention = spec.layer_types.count("attention")
    cache = num_attention * position * 2 * attention.kv_dim * 2
    if delta is not None:
        state = delta.num_value_heads * delta.key_dim * delta.value_dim * 4 * 2
        cache += (spec.num_layers - num_attention) * state
    return spec.num_parameters * 2 + num_lanes * cache


def prefill_flops(spec: ModelSpec) -> float:
    """Of the weight matrices and of causal attention; the delta rule itself is not counted."""
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
    weights = 2 * (spec.num_parameters - embeddings) * PROMPT_TOKENS
    pairs = PROMPT_TOKENS * PROMPT_TOKENS / 2
    return weights + spec.layer_types.count("attention") * 4 * pairs * spec.attention.query_dim


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


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
    assert CHUNK % CHUNK_TOKENS == 0
    main()
