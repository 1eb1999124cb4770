"""Decode and prefill of Qwen3-0.6B's shape in quantised weights, beside bf16 and llama.cpp.

    python -m scripts.bench_quantised_cpu [--mixes Q4_K_M,Q8_0] [--context 512] [--rounds 5]
        [--peer PYTHON]

Random weights, one lane, all variants in turns; before them products with a matrix that no cache
holds. `--peer`: an interpreter that has llama-cpp-python. Limits are bytes / read bandwidth.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does, before torch

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from luceasync.bench import command
from luceasync.bench.report import medians, paired_ratio
from luceasync.bench.model import Decoding, load_random, plan_for, prefill
from luceasync.bench.report import NOTHING, Report, figure, share
from luceasync.bench.report import interleave, wall
from luceasync.bench.shapes import SHAPES, state_bytes
from luceasync.models.encodings import WeightPlacement
from luceasync.models.quant.ggml import FORMS
from luceasync.models.quant.random import RandomModule
from luceasync.models.quant.stack import GroupedStack
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.platform import open_platform
from tests.acceptance.quantised.backends import open_file
from tests.acceptance.quantised.files import MIXES, write_random
from tests.acceptance.quantised.processes import Peer

NUM_TOKENS = 16  # decoded in each measurement
TYPES, HEAD_SHAPE = ("Q4_K", "Q6_K", "Q8_0"), (151_936, 1024)


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=5)
    parser.add_argument("--mixes", type=command.names, default=list(MIXES), help=",".join(MIXES))
    parser.add_argument("--context", type=int, default=512, help="tokens before those decoded")
    parser.add_argument("--peer", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=["qwen3-0.6b", "qwen3-4b"])
    options = parser.parse_args()
    report = command.begin(options)
    products(report, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        measure(report, options, Path(folder))


def products(report: Report, num_rounds: int) -> None:
    """Of one row and of four with a matrix as a vocabulary's head, in bf16."""
    runs: dict[str, Callable[[], float]] = {"read": lambda: 1 / read_bandwidth()}
    sizes = {}
    platform = open_platform("cpu:0")
    place = WeightPlacement(platform.ops, platform.device, torch.bfloat16)
    for name in TYPES:
        form, generator = FORMS[name], torch.Generator().manual_seed(1)
        stack = GroupedStack(form, HEAD_SHAPE, place)
        stack.fill(0, RandomModule(name, form, HEAD_SHAPE, generator), lambda rows: rows)
        weight = stack.weight()
        sizes[name] = weight.num_bytes
        for num_rows in (1, 4):
            x = torch.randn(num_rows, HEAD_SHAPE[1], dtype=torch.bfloat16)
            runs[f"{name}, {num_rows}"] = lambda own=weight, x=x: wall(lambda: own.linear(x))
    samples = interleave(runs, num_rounds, num_warmups=1)
    columns = ("products", "one row, GB/s", "of the read bandwidth", "four rows to one")
    table = report.table(columns)
    for name in TYPES:
        rate, limit = sizes[name] / min(samples[f"{name}, 1"]), 1 / min(samples["read"])
        four = min(samples[f"{name}, 4"]) / min(samples[f"{name}, 1"])
        table.add(name, figure(rate / 1e9, digits=1), share(rate / limit), figure(four))


def measure(report, options, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """All variants in turns."""
    shape, context = SHAPES[options.shape], options.context
    plan = plan_for(shape, ["cpu:0"], parallel=1, max_ctx_tokens=context + 256)
    backends = {"bf16": load_random(shape, plan)}
    peers: dict[str, Peer] = {}
    for mix in options.mixes:
        path = write_random(folder / f"{mix}.gguf", shape, mix)
        backends[mix] = open_file(path, context + 256, "bf16")
        if options.peer:
            peers[f"{mix}, llama.cpp"] = Peer(options.peer, path, context)
    prompt = [(7 * i) % 400 + 3 for i in range(context)]
    runs: dict[str, Callable[[], float]] = {}
    for name, backend in backends.items():
        runs[f"prefill, {name}"] = lambda own=backend: (
            context / wall(lambda: prefill(own, 0, prompt))
        )
        runs[f"decode, {name}"] = lambda own=backend: decode_rate(own, context)
    for name, peer in peers.items():
        runs[f"prefill, {name}"] = lambda own=peer: context / own.run("prefill")
        runs[f"decode, {name}"] = lambda own=peer: NUM_TOKENS / own.run(f"decode {NUM_TOKENS}")
    samples = interleave(runs, options.rounds, num_warmups=1)
    bandwidth = read_bandwidth()
    title = f"{options.shape}, context {context}, read bandwidth {bandwidth / 1e9:.1f} GB/s"
    columns = ("what", "tokens/s", "best", "limit", "of it", "to bf16", "to llama.cpp")
    table = report.table(columns, title)
    rates = medians(samples)
    for name, rate in rates.items():
        what, _, variant = name.partition(", ")
        row = [name, figure(rate, digits=1), figure(max(samples[name]), digits=1)]
        row += [NOTHING] * 4
        if what == "decode" and variant in backends:
            limit = bandwidth / step_bytes(backends[variant])
            row[3:5] = figure(limit, digits=1), share(rate / limit)
        if f"{what}, bf16" != name:
            row[5] = figure(paired_ratio(samples[name], samples[f"{what}, bf16"]))
        if f"{name}, llama.cpp" in samples:
            row[6] = figure(paired_ratio(samples[name], samples[f"{name}, llama.cpp"]))
        table.add(*row)
    for peer in peers.values():
        peer.close()


def decode_rate(backend: LayerSplitBackend, context: int) -> float:
    """Tokens per second from `context` tokens on, greedy."""
    decoding = Decoding(backend, 1, context)
    decoding.steps(2)  # what ran before left the caches to others
    return NUM_TOKENS / wall(lambda: decoding.steps(NUM_TOKENS))


def step_bytes(backend: LayerSplitBackend) -> int:
    """What a step reads: the weights, of which a tied embedding is the head."""
    plan = backend.plan
    return sum(shard.weight_bytes for shard in plan.shards) + state_bytes(plan, 1)


def read_bandwidth() -> float:
    """Bytes per second."""
    big = torch.ones(1 << 26)
    return big.nbytes / min(wall(big.sum) for _ in range(10))


if __name__ == "__main__":
    main()
