"""Decode and prefill of a Qwen3-0.6B-shaped random model beside transformers, in one run.

    python scripts/bench_decode.py [--device cpu:0] [--dtype bf16] [--context 1024] [--rounds 5]

One and four lanes, a small and an oversized context allocation, and transformers' generate on the
same weights. The limit of a decode step is its bytes / this machine's copy bandwidth.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does, before torch

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from luceasync.bench import command
from luceasync.bench.device import copy_bandwidth
from luceasync.bench.figures import median, medians, paired_ratio
from luceasync.bench.model import DTYPES, Decoding, plan_for, prefill, random_prompt
from luceasync.bench.report import NOTHING, figure, share
from luceasync.bench.rounds import interleave, wall
from luceasync.bench.shapes import SHAPES, step_bytes
from luceasync.models.config import read_spec
from luceasync.models.precision import torch_dtype
from luceasync.pipeline.backend import LayerSplitBackend

SHAPE = dict(SHAPES["qwen3-0.6b"]) | {"max_position_embeddings": 131072 + 64}
NUM_TOKENS = 24  # decoded in each measurement
NUM_WARMUP_TOKENS = 4
NUM_PAIRS = 12
SMALL, LARGE = "--max-ctx 2K", "--max-ctx 128K"
PEER = "transformers generate, 1 sequence"
ONE, ONE_LARGE = f"decode, 1 lane, {SMALL}", f"decode, 1 lane, {LARGE}"
FOUR = f"decode, 4 lanes, {SMALL}"
BASES = {ONE: PEER, ONE_LARGE: ONE, FOUR: ONE, f"prefill, {LARGE}": f"prefill, {SMALL}"}


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=5, device="cpu:0")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    context = options.context
    with tempfile.TemporaryDirectory() as folder:
        peer = save_random_model(Path(folder), torch_dtype(options.dtype))
        small = load(Path(folder), options.device, options.dtype, 2048)
        large = load(Path(folder), options.device, options.dtype, 128 * 1024)
    prompt = random_prompt(context)
    for backend in (small, large):
        for lane in range(backend.plan.parallel):
            prefill(backend, lane, prompt)
    runs: dict[str, Callable[[], float]] = {
        ONE: lambda: decode_rate(small, 1, context),
        ONE_LARGE: lambda: decode_rate(large, 1, context),
        FOUR: lambda: decode_rate(small, 4, context),
        f"prefill, {SMALL}": lambda: context / wall(lambda: prefill(small, 0, prompt)),
        f"prefill, {LARGE}": lambda: context / wall(lambda: prefill(large, 0, prompt)),
        PEER: lambda: peer_rate(peer, torch.tensor(prompt)),
    }
    samples = interleave(runs, options.rounds, num_warmups=0)
    rates = medians(samples)
    bandwidth = copy_bandwidth(options.device, 1 << 28)
    limits = {
        name: lanes * bandwidth / step_bytes(SHAPE, small.plan, lanes, context)
        for name, lanes in ((ONE, 1), (ONE_LARGE, 1), (FOUR, 4))
    }
    title = f"{options.device} {options.dtype}, context {context}"
    table = report.table(("what", "tokens/s", "limit", "of it", "ratio", "to"), title)
    for name, rate in rates.items():
        row = [name, figure(rate, digits=1), NOTHING, NOTHING, NOTHING, NOTHING]
        if name in limits:
            row[2:4] = figure(limits[name], digits=1), share(rate / limits[name])
        if name in BASES:
            base = BASES[name]
            row[4:] = figure(paired_ratio(samples[name], samples[base])), base
        table.add(*row)
    pairs = interleave({name: runs[name] for name in (ONE_LARGE, ONE)}, NUM_PAIRS, num_warmups=0)
    ratio = figure(paired_ratio(pairs[ONE_LARGE], pairs[ONE]))
    alone = figure(median(pairs[ONE_LARGE]), digits=1)
    table.add(f"{ONE_LARGE}, these two alone", alone, NOTHING, NOTHING, ratio, ONE)


def save_random_model(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """A random model of Qwen3-0.6B's shape, saved in `folder`, as transformers runs it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, eos_token_id=None)
    torch.set_default_dtype(dtype)
    model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return model


def load(folder: Path, device: str, dtype: str, max_ctx_tokens: int) -> LayerSplitBackend:
    """A backend; CPU memory is taken as it is touched, so the oversized one is cheap."""
    parallel = 4 if max_ctx_tokens < 2**16 else 1
    plan = plan_for(SHAPE, [device], parallel=parallel, max_ctx_tokens=max_ctx_tokens, dtype=dtype)
    return LayerSplitBackend.open(folder, read_spec(folder), plan)


def decode_rate(backend: LayerSplitBackend, num_lanes: int, context: int) -> float:
    """Tokens per second of all lanes together, from `context` tokens on, greedy."""
    decoding = Decoding(backend, num_lanes, context - NUM_WARMUP_TOKENS)
    decoding.steps(NUM_WARMUP_TOKENS)  # what ran before left the caches to others
    decoding.position = context
    return NUM_TOKENS * num_lanes / wall(lambda: decoding.steps(NUM_TOKENS))


@torch.inference_mode()
def peer_rate(model: torch.nn.Module, prompt: torch.Tensor) -> float:
    """Decoded tokens per second of transformers: a run of 1 + NUM_TOKENS less a run of 1."""

    def generate(num_tokens: int) -> None:
        model.generate(
            prompt[None], max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )

    first_s = wall(lambda: generate(1))
    return NUM_TOKENS / (wall(lambda: generate(1 + NUM_TOKENS)) - first_s)


if __name__ == "__main__":
    main()
