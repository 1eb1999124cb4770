"""Attention of a decode step on a GPU: Triton's two launches beside CUDA C++'s one, divided in
several ways.

    python -m scripts.bench_attend [--contexts 64,1024,8192,32768] [--lanes 1,4] [--json FILE]

Each runs as a chain of launches in a CUDA graph, as many as the model has such layers, each with
its own keys and values. The limit is those bytes at the rate of a plain copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from luceasync.bench import command
from luceasync.bench.device import by_events, captured, copy_bandwidth
from luceasync.bench.figures import medians
from luceasync.bench.report import Report, figure
from luceasync.bench.rounds import measure
from luceasync.kernels import attention, attention_cuda
from luceasync.kernels.attention_cuda import Share

NUM_REPLAYS = 10
SHARES = tuple(
    Share(warps, stages, splits)
    for warps, stages in ((4, 1), (4, 2), (8, 1), (8, 2))
    for splits in (8, 16, 32)
)


@dataclass(frozen=True, slots=True)
class Layer:
    """What a model has of attention, `count` times."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    gated: bool
    count: int

    @property
    def width(self) -> int:
        """Of the projection."""
        num_queries = self.num_heads * (2 if self.gated else 1)
        return (num_queries + 2 * self.num_kv_heads) * self.head_dim

    def num_bytes(self, context: int, num_lanes: int) -> int:
        """Of keys and values that a launch reads."""
        return num_lanes * context * self.num_kv_heads * self.head_dim * 4


LAYERS = (
    Layer("Qwen3-4B", 32, 8, 128, 128, gated=False, count=36),
    Layer("Qwen3-0.6B", 16, 8, 128, 128, gated=False, count=28),
)


def stores(layer: Layer, context: int, num_lanes: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer, [lanes, places, kv_heads, head_dim]."""
    num_places = (context // attention.PAGE_TOKENS + 1) * attention.PAGE_TOKENS
    shape = (num_lanes, num_places, layer.num_kv_heads, layer.head_dim)
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    return [(new(shape), new(shape)) for _ in range(layer.count)]


def bodies(most_bytes: int, layer: Layer) -> dict[str, Callable[..., Tensor]]:
    """By what they are called: Triton's, that of the rule, and the other shares that fit."""
    arrivals = attention_cuda.new_arrivals(torch.device("cuda"))
    ours = partial(attention_cuda.attend, arrivals=arrivals)
    group = layer.num_heads // layer.num_kv_heads
    heads = attention_cuda.Heads(
        layer.num_kv_heads, group, layer.head_dim, layer.rotary_dim // 2, layer.gated
    )
    found: dict[str, Callable[..., Tensor]] = {"Triton": attention.attend, "CUDA C++": ours}
    for share in SHARES:
        if attention_cuda.shared_of(heads, share) <= most_bytes:
            name = f"{share.warps} warps, {share.stages} stages, {share.splits} splits"
            found[name] = partial(ours, chosen=share)
    return found


def chain(
    layer: Layer, context: int, num_lanes: int, kept: list[tuple[Tensor, Tensor]]
) -> Callable[[Callable[..., Tensor]], None]:
    """Attends in every layer with the body that it is given."""
    new = partial(torch.randn, device="cuda")
    projected = new(num_lanes, layer.width, dtype=torch.bfloat16)
    norms = (new(layer.head_dim), new(layer.head_dim), 1e-6)
    turn = new(num_lanes, layer.rotary_dim // 2), new(num_lanes, layer.rotary_dim // 2)
    lanes = torch.arange(num_lanes, dtype=torch.int32, device="cuda")
    num_pages = context // attention.PAGE_TOKENS + 1
    pages = [torch.randperm(num_pages, device="cuda") for _ in range(num_lanes)]
    tables = torch.stack(pages).int()
    rest: dict[str, Any] = {
        "num_heads": layer.num_heads,
        "rotary_dim": layer.rotary_dim,
        "gated": layer.gated,
    }

    ranks = torch.full_like(lanes, context)

    def run(body: Callable[..., Tensor]) -> None:
        for keys, values in kept:
            body(projected, norms, keys, values, lanes, ranks, tables, turn, **rest)

    return run


def compare(report: Report, layer: Layer, context: int, num_lanes: int, peak: float) -> None:
    most_bytes = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    run = chain(layer, context, num_lanes, stores(layer, context, num_lanes))
    variants = {
        name: captured(partial(run, body))
        for name, body in bodies(most_bytes - attention_cuda.STATIC_BYTES, layer).items()
    }
    found = medians(measure(variants, NUM_REPLAYS, clock=by_events))
    num_bytes = layer.num_bytes(context, num_lanes)
    limit = figure(num_bytes / peak * 1e6, digits=2)
    title = f"{layer.name}, {context} tokens before, lanes: {num_lanes}"
    table = report.table(("divided as", "us a layer", "limit, us"), title)
    for name, seconds in found.items():
        table.add(name, figure(seconds / layer.count * 1e6, digits=2), limit)


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--contexts", type=command.numbers, default="64,1024,8192,32768")
    parser.add_argument("--lanes", type=command.numbers, default="1,4")
    options = parser.parse_args()
    report = command.begin(options, ["cuda:0"])
    peak = copy_bandwidth("cuda:0")
    for layer, lanes, context in itertools.product(LAYERS, options.lanes, options.contexts):
        compare(report, layer, context, lanes, peak)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
