"""Verify passes beside decode steps on a GPU, of well-known shapes with random weights.

    python -m scripts.bench_verify [--shapes qwen3-4b,qwen3.5-4b] [--contexts 1024,32768]

A round is what speculation costs the target: verify a proposal, bring the best tokens to the host,
commit a path. Rounds and decode steps alternate in one run; ratios are of their medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from luceasync.models.config import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.trees import ROOT
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.plan import make_plan
from scripts.bench_gpu import SHAPES, bytes_read, measure_rates, prefill

NUM_ROUNDS = 40
NUM_ACCEPTED = 6  # rows of a path, where the proposal is that deep


@dataclass(frozen=True)
class Proposal:
    """Rows to verify: a chain, or a tree whose rows hang on random earlier ones."""

    name: str
    parents: tuple[int, ...]

    @property
    def path(self) -> list[int]:
        """The first rows of the deepest path."""
        paths: list[list[int]] = []
        for row, parent in enumerate(self.parents):
            paths.append([row] if parent == ROOT else [*paths[parent], row])
        return max(paths, key=len)[:NUM_ACCEPTED]


def chain_of(num_rows: int) -> Proposal:
    return Proposal(f"chain of {num_rows}", tuple(range(ROOT, num_rows - 1)))


def tree_of(num_rows: int) -> Proposal:
    """Bushy at its root, as trees of the likeliest continuations are."""
    choose = random.Random(num_rows)
    parents = (ROOT, *(min(row - 1, choose.randrange(12)) for row in range(1, num_rows)))
    return Proposal(f"tree of {num_rows}", parents)


PROPOSALS = (chain_of(8), chain_of(16), tree_of(22), tree_of(60))


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="qwen3-4b,qwen3.5-4b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--contexts", default="1024,32768")
    parser.add_argument("--lanes", default="1,4")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    copy_bytes_per_s = measure_rates().copy_bytes_per_s
    lines = [
        f"Copy bandwidth {copy_bytes_per_s / 1e9:.0f} GB/s.",
        "",
        "| shape | lanes, context | decode | limit | "
        + " | ".join(proposal.name for proposal in PROPOSALS)
        + " |",
        "|---" * (4 + len(PROPOSALS)) + "|",
    ]
    for shape in options.shapes.split(","):
        for line in measure(shape, options, copy_bytes_per_s):
            lines.append(line)
            print(line, flush=True)
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def measure(shape: str, options: argparse.Namespace, copy_bytes_per_s: float) -> list[str]:
    """A row of the table for each number of lanes and context."""
    spec = parse_spec(SHAPES[shape])
    contexts = sorted(int(text) for text in options.contexts.split(","))
    lanes = [int(text) for text in options.lanes.split(",")]
    plan = make_plan(
        spec,
        find_devices([options.device]),
        dtype="bf16",
        weights=None,
        parallel=max(lanes),
        max_ctx_tokens=contexts[-1] + 256,
        prefill_chunk_tokens=None,
        verify_rows=[len(proposal.parents) for proposal in PROPOSALS],
    )
    started = time.perf_counter()
    backend = LayerSplitBackend.load(spec, plan, RandomSource(torch.bfloat16, torch.device("cuda")))
    print(f"{shape}: loaded and captured in {time.perf_counter() - started:.1f} s", flush=True)
    prompt = torch.randint(10, spec.vocab_size - 10, (contexts[-1],)).tolist()
    lines = []
    for context in contexts:
        for lane in range(max(lanes)):
            prefill(backend, lane, prompt[:context])
        for num_lanes in lanes:
            limit_s = bytes_read(spec, plan.shards, num_lanes, context) / copy_bytes_per_s
            decode_s, *rounds_s = medians(passes(backend, num_lanes, context))
            ratios = " | ".join(f"{s * 1e3:.2f} ms, {s / decode_s:.2f}" for s in rounds_s)
            times = f"{decode_s * 1e3:.2f} ms | {limit_s * 1e3:.2f} ms"
            lines.append(f"| {shape} | {num_lanes} at {context} | {times} | {ratios} |")
    backend.close()
    return lines


def passes(backend: LayerSplitBackend, num_lanes: int, context: int) -> list[Callable[[], object]]:
    """A decode step, and a round of every proposal; each brings its best tokens to the host."""
    lanes, begins = list(range(num_lanes)), [context] * num_lanes

    def decode() -> object:
        return backend.decode(lanes, begins, [7] * num_lanes).argmax(-1).tolist()

    def round_of(proposal: Proposal) -> Callable[[], object]:
        shape = (num_lanes, len(proposal.parents))
        tokens = torch.randint(10, 1000, shape, device="cuda")
        parents = torch.tensor(proposal.parents, dtype=torch.int32, device="cuda")
        parents = parents.expand(shape).contiguous()
        paths = [proposal.path] * num_lanes
        return lambda: run_round(backend, lanes, begins, tokens, parents, paths)

    return [decode, *map(round_of, PROPOSALS)]


def run_round(
    backend: LayerSplitBackend,
    lanes: Sequence[int],
    begins: Sequence[int],
    tokens: Tensor,
    parents: Tensor,
    paths: Sequence[Sequence[int]],
) -> object:
    best = backend.verify(lanes, begins, tokens, parents).argmax(-1).tolist()
    backend.commit(paths)
    torch.cuda.synchronize()
    return best


def medians(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each, taken in turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(NUM_ROUNDS):
        for run, times in zip(runs, seconds, strict=True):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    return [statistics.median(times[3:]) for times in seconds]


if __name__ == "__main__":
    main()
