"""Decode and prefill of a Qwen3-0.6B-shaped random model beside transformers, in one run.

    python scripts/bench_decode.py [--device cpu:0] [--dtype bf16] [--context 1024] [--rounds 5]

Prints medians over interleaved rounds: one and four lanes, a small and an oversized context
allocation, and transformers' generate on the same weights.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does, before torch

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from luceasync.models.config import read_spec
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan

NUM_TOKENS = 24  # decoded in each measurement
NUM_WARMUP_TOKENS = 4
NUM_PAIRS = 12


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        peer = save_random_model(Path(folder), DTYPES[options.dtype])
        small = load(Path(folder), options, max_ctx_tokens=2048)
        large = load(Path(folder), options, max_ctx_tokens=128 * 1024)
    prompt = torch.randint(
        10, 150_000, (options.context,), generator=torch.Generator().manual_seed(0)
    )
    runs: dict[str, Callable[[], float]] = {
        "decode, 1 lane, --max-ctx 2K": lambda: decode_rate(small, 1, options.context),
        "decode, 1 lane, --max-ctx 128K": lambda: decode_rate(large, 1, options.context),
        "decode, 4 lanes, --max-ctx 2K": lambda: decode_rate(small, 4, options.context),
        "prefill, --max-ctx 2K": lambda: prefill_rate(small, prompt),
        "prefill, --max-ctx 128K": lambda: prefill_rate(large, prompt),
        "transformers generate, 1 sequence": lambda: peer_rate(peer, prompt),
    }
    for backend in (small, large):
        for lane in range(4):
            prefill(backend, lane, prompt)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(options.rounds):
        # There and back: what ran before a measurement is not the same in every round.
        for name, run in (runs if i % 2 == 0 else dict(reversed(runs.items()))).items():
            rates[name].append(run())
    medians = {name: statistics.median(values) for name, values in rates.items()}
    table = Table(
        "what",
        "tokens/s",
        "ratio",
        title=f"{options.device} {options.dtype}, context {options.context}",
    )
    base = {
        "decode, 1 lane, --max-ctx 2K": "transformers generate, 1 sequence",
        "decode, 1 lane, --max-ctx 128K": "decode, 1 lane, --max-ctx 2K",
        "decode, 4 lanes, --max-ctx 2K": "decode, 1 lane, --max-ctx 2K",
        "prefill, --max-ctx 128K": "prefill, --max-ctx 2K",
    }
    for name, rate in medians.items():
        ratio = f"{rate / medians[base[name]]:.2f} x {base[name]}" if name in base else ""
        table.add_row(name, f"{rate:.1f}", ratio)
    names = ("decode, 1 lane, --max-ctx 128K", "decode, 1 lane, --max-ctx 2K")
    ratio = paired_ratio(runs[names[0]], runs[names[1]])
    table.add_row("the same two, alone", "", f"{ratio:.2f} (median of {NUM_PAIRS} pairs)")
    Console(width=110).print(table)


def paired_ratio(first: Callable[[], float], second: Callable[[], float]) -> float:
    """Median of first / second over pairs that are run back to back, in alternating order."""
    ratios = []
    for i in range(NUM_PAIRS):
        a, b = (first, second) if i % 2 == 0 else (second, first)
        one, other = a(), b()
        ratios.append(one / other if i % 2 == 0 else other / one)
    return statistics.median(ratios)


def save_random_model(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """A random model of Qwen3-0.6B's shape, saved in `folder`, as transformers runs it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=131072 + 64,
        eos_token_id=None,
    )
    torch.set_default_dtype(dtype)
    model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return model


def load(folder: Path, options: argparse.Namespace, max_ctx_tokens: int) -> LayerSplitBackend:
    """A backend; CPU memory is taken as it is touched, so the oversized one is cheap."""
    spec = read_spec(folder)
    plan = make_plan(
        spec,
        [offer_of(options.device, 64 * 2**30)],
        dtype=options.dtype,
        weights=None,
        parallel=4 if max_ctx_tokens < 2**16 else 1,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=None,
    )
    return LayerSplitBackend.open(folder, spec, plan)


def prefill(backend: LayerSplitBackend, lane: int, prompt: torch.Tensor) -> None:
    """Run the prompt on the lane, chunk by chunk."""
    if lane >= backend.plan.parallel:
        return
    backend.reset(lane)
    chunk = backend.plan.prefill_chunk_tokens
    for begin in range(0, len(prompt), chunk):
        end = min(begin + chunk, len(prompt))
        backend.prefill(lane, begin, prompt[begin:end].tolist(), project=end == len(prompt))


def decode_rate(backend: LayerSplitBackend, num_lanes: int, context: int) -> float:
    """Tokens per second of all lanes together, from `context` tokens on, greedy."""
    lanes = list(range(num_lanes))
    tokens = [1] * num_lanes
    begin = context - NUM_WARMUP_TOKENS  # what ran before left the caches to others
    for position in range(begin, context + NUM_TOKENS):
        if position == context:
            started = time.perf_counter()
        logits = backend.decode(lanes, [position] * num_lanes, tokens)
        tokens = logits.argmax(-1).tolist()
    return NUM_TOKENS * num_lanes / (time.perf_counter() - started)


def prefill_rate(backend: LayerSplitBackend, prompt: torch.Tensor) -> float:
    """Prompt tokens per second."""
    started = time.perf_counter()
    prefill(backend, 0, prompt)
    return len(prompt) / (time.perf_counter() - started)


@torch.inference_mode()
def peer_rate(model: torch.nn.Module, prompt: torch.Tensor) -> float:
    """Decoded tokens per second of transformers: a run of 1 + NUM_TOKENS less a run of 1."""
    seconds = []
    for num_tokens in (1, 1 + NUM_TOKENS):
        started = time.perf_counter()
        model.generate(
            prompt[None], max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )
        seconds.append(time.perf_counter() - started)
    return NUM_TOKENS / (seconds[1] - seconds[0])


if __name__ == "__main__":
    main()
