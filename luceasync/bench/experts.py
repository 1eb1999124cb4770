"""`luceasync bench kernels`: layers of routed experts on a GPU, resident and in slots, beside the
bytes of the chosen experts.

Sizes are those of a layer of Qwen3.5-35B-A3B; rows are random, and so are the experts that they
choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from luceasync.bench.device import (
    by_events,
    captured,
    copy_bandwidth,
    host_bandwidth,
    matmul_rate,
    release_memory,
    synchronize,
)
from luceasync.bench.report import Report, measure, median, medians, share, us
from luceasync.models import torch_experts
from luceasync.models.ops import Norm, Ops, OpsWithSlots, RoutedExperts
from luceasync.models.quant.ggml import ENCODINGS
from luceasync.models.quant.random import random_packed
from luceasync.models.triton_ops import TritonOps
from luceasync.models.weights import ExpertWeights, Router, Routing, Weight
from luceasync.pipeline.platform import open_platform

DEVICE = "cuda:0"
NUM_EXPERTS, NUM_CHOSEN, HIDDEN, INNER = 256, 8, 2048, 512
ROUTING = Routing(NUM_CHOSEN)
# Types of gates and ups, and of downs, per layer; Q4_K_M has both kinds of downs.
MIXES: dict[str, tuple[tuple[str, str], ...]] = {
    "bf16": (("", ""),),
    "Q4_K_M": (("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")),
}
NUM_LAYERS = {"bf16": 4, "Q4_K_M": 12}  # more bytes than a cache holds
PROMPT_ROWS = 8192
SLOT_SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)  # of a layer's experts; 0: the minimum
NUM_STEPS = 40


def layer_of(ops: Ops, types: tuple[str, str], seed: int) -> RoutedExperts:
    """A layer with random weights, the same for any ops."""
    random = torch.Generator(DEVICE).manual_seed(seed)

    def plain(*shape: int) -> Tensor:
        numbers = torch.randn(shape, device=DEVICE, generator=random, dtype=torch.bfloat16)
        return numbers.mul_(shape[-1] ** -0.5)

    exact = [plain(n, HIDDEN).float() for n in (NUM_EXPERTS, 1)]
    norm = Norm(ops, torch.ones(HIDDEN, device=DEVICE), 1e-6)
    router, gate = map(ops.float_matrix, exact)
    halves: list[ExpertWeights] = []
    shared: list[Weight] = []
    for parts, (height, width), kind in zip(
        (2, 1), ((INNER, HIDDEN), (HIDDEN, INNER)), types, strict=True
    ):
        shapes = (parts * NUM_EXPERTS * height, width), (parts * height, width)
        if kind:
            packed = [random_packed(ENCODINGS[kind], shape, random) for shape in shapes]
            halves.append(ops.quantised_experts(packed[0], NUM_EXPERTS, parts, torch.bfloat16))
            shared.append(ops.quantised(packed[1], torch.bfloat16))
        else:
            halves.append(ops.experts(plain(*shapes[0]), NUM_EXPERTS, parts))
            shared.append(ops.pack(plain(*shapes[1])))
    both = ops.gated(shared[0], shared[1])
    return ops.routed(Router(ROUTING, norm, router, None, gate), halves[0], halves[1], both)


def layers_of(ops: Ops, mix: str) -> list[RoutedExperts]:
    types = MIXES[mix]
    return [layer_of(ops, types[i % len(types)], i) for i in range(NUM_LAYERS[mix])]


def run_all(layers: Sequence[RoutedExperts], x: Tensor) -> Tensor:
    out = x.clone()
    for layer in layers:
        out = layer.add_to(out)
    return out


def _warm_up(layers: Sequence[RoutedExperts], rows: Sequence[int]) -> None:
    """Compile for each number of rows, in parallel."""
    each = [torch.randn(n, HIDDEN, device=DEVICE, dtype=torch.bfloat16) for n in rows]

    def run() -> None:
        for x in each:
            run_all(layers[:2], x)

    open_platform(DEVICE).warm_up(run, 1)


def bytes_of(layer: RoutedExperts) -> tuple[float, int]:
    """Bytes of an expert, and bytes that every row reads."""
    assert layer.shared is not None
    experts = layer.gate_up.num_bytes + layer.down.num_bytes
    others = layer.router.weight.num_bytes + layer.shared.num_bytes
    return experts / NUM_EXPERTS, others


def distinct(layers: Sequence[RoutedExperts], x: Tensor) -> float:
    """The average number of a layer's experts that the rows choose."""
    counts = []
    for layer in layers:
        logits = layer.router.weight.linear(layer.router.norm(x).float())
        choice = torch_experts.choose(logits, None, ROUTING)
        counts.append(int((choice.bounds.diff() > 0).sum()))
        x = layer.add_to(x.clone())
    return sum(counts) / len(counts)


@torch.inference_mode()
def bench_experts(report: Report, *, rows: Sequence[int], rounds: int) -> None:
    """Layers of a few rows, and of a long prompt, with all experts on the device."""
    bandwidth, rate = copy_bandwidth(DEVICE), matmul_rate(DEVICE)
    columns = ("experts", "rows", "distinct", "layer", "limit", "limit / layer")
    table = report.table(columns, "a layer of experts; limit: bytes of the chosen, or products")
    for mix in MIXES:
        layers = layers_of(TritonOps(), mix)
        expert_bytes, other_bytes = bytes_of(layers[0])
        _warm_up(layers, rows)
        for count in [*rows, PROMPT_ROWS]:
            x = torch.randn(count, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
            is_prompt = count > max(rows)
            own = layers[:2] if is_prompt else layers
            run = partial(run_all, own, x)
            met = NUM_EXPERTS if is_prompt else distinct(own, x)
            chain = run if is_prompt else captured(run)
            found = medians(measure({"": chain}, rounds, num_warmups=2, clock=by_events))
            layer_s = found[""] / len(own)
            flops = 2.0 * count * (NUM_CHOSEN + 1) * 3 * HIDDEN * INNER
            limit_s = max((met * expert_bytes + other_bytes) / bandwidth, flops / rate)
            cells = (us(layer_s), us(limit_s), share(limit_s / layer_s))
            table.add(mix, count, f"{met:.1f}", *cells)
        del layers
        release_memory()


@torch.inference_mode()
def bench_slots(report: Report, *, rows: Sequence[int], rounds: int) -> None:
    """Layers with experts in host memory, by the fraction of them that slots hold."""
    bandwidth, bus = copy_bandwidth(DEVICE), host_bandwidth(DEVICE, 1 << 30)
    report.say(f"copies {bandwidth / 1e9:.0f} GB/s, from pinned memory {bus / 1e9:.1f} GB/s")
    columns = ("experts", "slots", "rows", "hits", "missed", "layer", "limit", "limit / layer")
    table = report.table(columns, "experts in host memory, what rows choose is random")
    for mix, types in MIXES.items():
        expert_bytes, other_bytes = bytes_of(layer_of(TritonOps(), types[0], 0))
        for part in SLOT_SHARES:
            num_slots = max(NUM_CHOSEN, int(part * NUM_EXPERTS))
            ops = open_platform(DEVICE).slotted_ops(num_slots)
            layers = [layer_of(ops, types[0], seed) for seed in range(2)]
            ops.allocate()
            _warm_up(layers, rows)
            for count in (count for count in rows if count * NUM_CHOSEN <= num_slots):
                seconds, hits, missed = _steps(ops, layers, count)
                layer_s = seconds / len(layers)
                near_s = (hits * expert_bytes + other_bytes) / bandwidth
                limit_s = missed * expert_bytes / bus + near_s
                cells = (us(layer_s), us(limit_s), share(limit_s / layer_s))
                table.add(mix, num_slots, count, f"{hits:.1f}", f"{missed:.1f}", *cells)
            if part == SLOT_SHARES[1]:
                x = torch.randn(PROMPT_ROWS, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
                prompt = partial(run_all, layers, x)
                samples = measure({"": prompt}, rounds, num_warmups=1, clock=by_events)
                layer_s = median(samples[""]) / len(layers)
                limit_s = NUM_EXPERTS * expert_bytes / bus
                cells = (us(layer_s), us(limit_s), share(limit_s / layer_s))
                table.add(mix, num_slots, PROMPT_ROWS, "-", str(NUM_EXPERTS), *cells)
            del layers, ops
            release_memory()


def _steps(
    ops: OpsWithSlots, layers: Sequence[RoutedExperts], num_rows: int
) -> tuple[float, float, float]:
    """Seconds per step, and hits and misses per layer."""
    x = torch.randn(num_rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    step, seconds = captured(lambda: run_all(layers, x)), []
    for number in range(2 * NUM_STEPS):
        if number == NUM_STEPS:  # the slots are full now
            synchronize()
            before = ops.counts()
        x.normal_()
        seconds.append(by_events(step))
    synchronize()
    counts = {name: count - before[name] for name, count in ops.counts().items()}
    each = NUM_STEPS * len(layers)
    missed = counts["misses"] + counts["read through"]
    return sum(seconds[NUM_STEPS:]) / NUM_STEPS, counts["hits"] / each, missed / each
