"""Gaps between the tokens of one stream while nodes are saved and restored beside it, on a GPU.

    python scripts/bench_save.py [--shape qwen3.5-27b] [--device cuda:0] [--tokens 16384]

Random weights. Prints a markdown table: gaps with a node under way at every moment beside gaps
without, and the bytes per second of nodes beside those of one plain copy of pinned memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from bench_gpu import SHAPES

from luceasync.hoststore.arena import Arena
from luceasync.hoststore.memory import HostMemory
from luceasync.hoststore.nodes import Span
from luceasync.hoststore.tickets import Arrived, Ticket
from luceasync.models.config import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices, host_memory
from luceasync.pipeline.plan import make_plan

STREAM, SOURCE, TARGET = range(3)  # lanes: one decodes, one is saved, one is restored into
STREAM_TOKENS = 1024
TURN_TOKENS = 256
NUM_STEPS = 150  # of one phase
NUM_RUNS = 7
CAPACITY_BYTES = 8 << 30
Row = tuple[str, float, str, float | None]  # what, figure, unit, ratio to what it is held against


class Stream:
    """Greedy decoding on one lane, as the engine runs it: each token comes to the host."""

    def __init__(self, backend: LayerSplitBackend) -> None:
        self._backend = backend
        self._token = 1

    def gaps(self, beside: Callable[[], object]) -> list[float]:
        """Seconds between tokens, with `beside` called before each step."""
        seconds = []
        for position in range(STREAM_TOKENS, STREAM_TOKENS + NUM_STEPS):
            started = time.perf_counter()
            beside()
            logits = self._backend.decode([STREAM], [position], [self._token])
            self._token = int(logits.argmax(-1))
            seconds.append(time.perf_counter() - started)
        return seconds


class Traffic:
    """A chain of nodes, saved or restored again and again: as soon as it has arrived."""

    def __init__(self, backend: LayerSplitBackend, num_tokens: int, num_nodes: int) -> None:
        self._backend = backend
        ends = [num_tokens * (i + 1) // num_nodes for i in range(num_nodes)]
        self._spans = [
            Span(begin, end, end == num_tokens)
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        self._names = [f"{num_nodes}-{end}" for end in ends]
        sizes = [backend.nodes.sizes.of(span) for span in self._spans]
        self.num_bytes = sum(rows + state for rows, state in sizes)
        self.num_saves = self.num_restores = 0
        self._saved: Ticket = Arrived()
        self._restored: Ticket = Arrived()

    def save(self) -> None:
        """Begin to save the source lane if that is not under way."""
        if not self._saved.is_done:
            return
        for name, span in zip(self._names, self._spans, strict=True):
            self._backend.nodes.drop(name)
            self._saved = self._backend.nodes.save(SOURCE, name, span)
        self.num_saves += 1

    def wait(self) -> None:
        """Wait for what is under way."""
        self._saved.wait()
        self._restored.wait()
        torch.cuda.synchronize()

    def restore(self) -> None:
        """Begin to put the chain into the target lane if that is not under way."""
        if self._restored.is_done:
            self._restored = self._backend.nodes.restore(TARGET, self._names, self._spans[-1].end)
            self.num_restores += 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3.5-27b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    started = time.perf_counter()
    memory = host_memory([options.device], CAPACITY_BYTES)
    rows: list[Row] = [("first pinned slab", time.perf_counter() - started, "s", None)]
    assert isinstance(memory, Arena) and memory.wait(600)
    rate = CAPACITY_BYTES / (time.perf_counter() - started)
    rows.append((f"pinning {CAPACITY_BYTES >> 30} GiB", rate / 1e9, "GB/s", None))
    backend = load(options, memory)
    node = Traffic(backend, options.tokens, 1)
    turns = Traffic(backend, options.tokens, options.tokens // TURN_TOKENS)
    node.save()
    turns.save()
    rows += measure_gaps(backend, node, turns, options.rounds)
    rows += measure_rates(node, turns)
    backend.close()
    memory.close()
    print("| what | figure | ratio |\n|---|---|---|")
    for what, figure, unit, ratio in rows:
        print(f"| {what} | {figure:.2f} {unit} | {'' if ratio is None else f'{ratio:.2f}'} |")


def load(options: argparse.Namespace, memory: HostMemory) -> LayerSplitBackend:
    """The model with its lanes filled."""
    spec = parse_spec(SHAPES[options.shape])
    plan = make_plan(
        spec,
        find_devices([options.device]),
        dtype="bf16",
        weights=None,
        parallel=3,
        max_ctx_tokens=options.tokens + STREAM_TOKENS,
        prefill_chunk_tokens=None,
    )
    source = RandomSource(torch.bfloat16, torch.device(options.device))
    backend = LayerSplitBackend.load(spec, plan, source, memory=memory)
    for lane, num_tokens in ((STREAM, STREAM_TOKENS), (SOURCE, options.tokens)):
        for begin in range(0, num_tokens, plan.prefill_chunk_tokens):
            num_rows = min(plan.prefill_chunk_tokens, num_tokens - begin)
            tokens = torch.randint(10, 9999, (num_rows,)).tolist()
            backend.prefill(lane, begin, tokens, project=False)
    torch.cuda.synchronize()
    return backend


def measure_gaps(
    backend: LayerSplitBackend, node: Traffic, turns: Traffic, num_rounds: int
) -> Iterator[Row]:
    """Gaps of a stream alone, beside saves and beside restores, in turns."""
    stream = Stream(backend)
    phases: dict[str, Callable[[], object]] = {
        "alone": lambda: None,
        "beside saves": node.save,
        "beside restores": node.restore,
        "beside restores of turns": turns.restore,
    }
    gaps: dict[str, list[float]] = {name: [] for name in phases}
    stream.gaps(phases["alone"])  # to warm up
    for name, beside in [*phases.items()] * num_rounds:
        gaps[name] += stream.gaps(beside)
        node.wait()
        turns.wait()
    for name, seconds in gaps.items():
        for percentile in (50, 99):
            figure, alone = (
                statistics.quantiles(s, n=100)[percentile - 1] for s in (seconds, gaps["alone"])
            )
            yield f"gap p{percentile}, {name}", figure * 1e3, "ms", figure / alone
        yield f"gap max, {name}", max(seconds) * 1e3, "ms", max(seconds) / max(gaps["alone"])
    yield "nodes saved meanwhile", node.num_saves, "", None
    yield "nodes restored meanwhile", node.num_restores, "", None
    yield "chains of turns restored meanwhile", turns.num_restores, "", None


def measure_rates(node: Traffic, turns: Traffic) -> Iterator[Row]:
    """Nodes beside one copy of as many bytes of torch's own pinned memory, with nothing else."""
    host = torch.zeros(node.num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(node.num_bytes, dtype=torch.uint8, device="cuda")
    runs: dict[str, Callable[[], object]] = {
        "one copy out": lambda: host.copy_(device, non_blocking=True),
        "save of a node": node.save,
        "one copy in": lambda: device.copy_(host, non_blocking=True),
        "restore of a node": node.restore,
        "restore of turns": turns.restore,
    }
    queued: dict[str, list[float]] = {name: [] for name in runs}
    arrived: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_RUNS):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            queued[name].append(time.perf_counter() - started)
            node.wait()
            turns.wait()
            arrived[name].append(time.perf_counter() - started)
    plain_s = 0.0
    for name in runs:
        seconds = statistics.median(arrived[name])
        plain_s = seconds if name.startswith("one copy") else plain_s
        rate = node.num_bytes / seconds / 1e9
        yield f"{name}, {node.num_bytes / 1e6:.0f} MB", rate, "GB/s", plain_s / seconds
        yield f"{name}: time to queue", statistics.median(queued[name]) * 1e3, "ms", None


if __name__ == "__main__":
    main()
