"""Gaps between the tokens of one stream while nodes are saved and restored beside it, on a GPU.

    python scripts/bench_save.py [--shape qwen3.5-27b] [--device cuda:0] [--tokens 16384]

Random weights. Prints a markdown table: gaps with a node under way at every moment beside gaps
without, and the bytes per second of nodes beside those of one plain copy of pinned memory.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch

from luceasync.bench import command
from luceasync.bench.device import synchronize
from luceasync.bench.figures import median, percentile
from luceasync.bench.model import load_random, plan_for, prefill, random_prompt
from luceasync.bench.report import NOTHING, Cell, Report, figure, ms
from luceasync.bench.rounds import Run, interleave
from luceasync.bench.shapes import SHAPES
from luceasync.host_cache.arena import Arena, HostMemory
from luceasync.host_cache.copy_stream import Arrived, Ticket
from luceasync.host_cache.nodes import Span
from luceasync.nodes import NodeKey
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import host_memory
from luceasync.pipeline.platform import open_platform

STREAM, SOURCE, TARGET = range(3)  # lanes: one decodes, one is saved, one is restored into
STREAM_TOKENS = 1024
TURN_TOKENS = 256
NUM_STEPS = 150  # of one phase
NUM_RUNS = 7
CAPACITY_BYTES = 8 << 30
COLUMNS = ("what", "figure", "ratio")


class Stream:
    """Greedy decoding on one lane, as the engine runs it: each token comes to the host."""

    def __init__(self, backend: LayerSplitBackend) -> None:
        self._backend = backend
        self._token = 1

    def gaps(self, beside: Run) -> list[float]:
        """Seconds between tokens, with `beside` called before each step."""
        seconds = []
        for position in range(STREAM_TOKENS, STREAM_TOKENS + NUM_STEPS):
            started = time.perf_counter()
            beside()
            logits = self._backend.decode([STREAM], [position], [self._token]).whole()
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
        self._names = [NodeKey(f"{num_nodes}-{end}".encode()) for end in ends]
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
        synchronize()

    def restore(self) -> None:
        """Begin to put the chain into the target lane if that is not under way."""
        if self._restored.is_done:
            self._restored = self._backend.nodes.restore(TARGET, self._names, self._spans[-1].end)
            self.num_restores += 1


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=2, device="cuda:0")
    parser.add_argument("--shape", default="qwen3.5-27b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    memory = pinned(report, options.device)
    backend = load(options, memory)
    node = Traffic(backend, options.tokens, 1)
    turns = Traffic(backend, options.tokens, options.tokens // TURN_TOKENS)
    node.save()
    turns.save()
    measure_gaps(report, Stream(backend), node, turns, options.rounds)
    measure_rates(report, options.device, node, turns)
    backend.close()
    memory.close()


def pinned(report: Report, device: str) -> HostMemory:
    """All of the memory for nodes, pinned."""
    started = time.perf_counter()
    memory = host_memory([device], CAPACITY_BYTES)
    table = report.table(COLUMNS, "memory")
    table.add("first pinned slab", figure(time.perf_counter() - started, "s"), NOTHING)
    assert isinstance(memory, Arena) and memory.wait(600)
    rate = CAPACITY_BYTES / (time.perf_counter() - started)
    table.add(f"pinning {CAPACITY_BYTES >> 30} GiB", figure(rate / 1e9, "GB/s"), NOTHING)
    return memory


def load(options: argparse.Namespace, memory: HostMemory) -> LayerSplitBackend:
    """The model with its lanes filled."""
    shape, room = SHAPES[options.shape], options.tokens + STREAM_TOKENS
    plan = plan_for(shape, [options.device], parallel=3, max_ctx_tokens=room)
    backend = load_random(shape, plan, memory=memory)
    prefill(backend, STREAM, random_prompt(STREAM_TOKENS))
    prefill(backend, SOURCE, random_prompt(options.tokens))
    return backend


def measure_gaps(
    report: Report, stream: Stream, node: Traffic, turns: Traffic, num_rounds: int
) -> None:
    """Gaps of a stream alone, beside saves and beside restores, in turns."""

    def gaps(beside: Run) -> list[float]:
        seconds = stream.gaps(beside)
        node.wait()
        turns.wait()
        return seconds

    phases = {
        "alone": lambda: gaps(lambda: None),
        "beside saves": lambda: gaps(node.save),
        "beside restores": lambda: gaps(node.restore),
        "beside restores of turns": lambda: gaps(turns.restore),
    }
    phases["alone"]()  # to warm up
    found = interleave(phases, num_rounds, num_warmups=0)
    samples = {name: [gap for part in parts for gap in part] for name, parts in found.items()}
    table = report.table(COLUMNS, "gaps between the tokens of a stream")
    for name, seconds in samples.items():
        for percent, what in ((50, "p50"), (99, "p99"), (100, "max")):
            gap, alone = (percentile(each, percent) for each in (seconds, samples["alone"]))
            table.add(f"gap {what}, {name}", ms(gap, 2), figure(gap / alone))
    table.add("nodes saved meanwhile", node.num_saves, NOTHING)
    table.add("nodes restored meanwhile", node.num_restores, NOTHING)
    table.add("chains of turns restored meanwhile", turns.num_restores, NOTHING)


def measure_rates(report: Report, device: str, node: Traffic, turns: Traffic) -> None:
    """Nodes beside one copy of as many bytes of torch's own pinned memory, with nothing else."""
    host = torch.zeros(node.num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(node.num_bytes, dtype=torch.uint8, device=open_platform(device).device)
    runs: dict[str, Run] = {
        "one copy out": lambda: host.copy_(there, non_blocking=True),
        "save of a node": node.save,
        "one copy in": lambda: there.copy_(host, non_blocking=True),
        "restore of a node": node.restore,
        "restore of turns": turns.restore,
    }
    bases = {"save of a node": "one copy out"} | dict.fromkeys(
        ("restore of a node", "restore of turns"), "one copy in"
    )

    def timed(run: Run) -> tuple[float, float]:
        """Seconds until it is queued, and until it has arrived."""
        started = time.perf_counter()
        run()
        queued_s = time.perf_counter() - started
        node.wait()
        turns.wait()
        return queued_s, time.perf_counter() - started

    found = interleave({name: partial(timed, run) for name, run in runs.items()}, NUM_RUNS)
    seconds = {name: median([arrived for _, arrived in parts]) for name, parts in found.items()}
    table = report.table(COLUMNS, "nothing else under way")
    for name, parts in found.items():
        rate = figure(node.num_bytes / seconds[name] / 1e9, "GB/s")
        ratio: Cell = figure(seconds[bases.get(name, name)] / seconds[name])
        table.add(f"{name}, {node.num_bytes / 1e6:.0f} MB", rate, ratio)
        queued_s = median([queued for queued, _ in parts])
        table.add(f"{name}: time to queue", ms(queued_s, 2), NOTHING)


if __name__ == "__main__":
    main()
