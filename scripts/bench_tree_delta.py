"""Gated DeltaNet of a verify pass on a GPU: one launch a layer beside three, and a decode step's.

    python -m scripts.bench_tree_delta [--rows 4,16] [--lanes 1,4] [--json FILE]

Each runs as a chain in a CUDA graph, as many as the model has such layers, each with its own states
and weights: by itself, and between products whose own time is taken off, as in a model, where
nothing is left in a cache and a kernel in front leaves it little room to begin early.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from luceasync.bench import command
from luceasync.bench.device import by_events, captured, num_copies
from luceasync.bench.figures import medians
from luceasync.bench.report import Report, figure
from luceasync.bench.rounds import Run, measure
from luceasync.kernels import gemv, small_gemm
from luceasync.kernels.delta import delta_step
from luceasync.kernels.small_tree_delta import delta_small_tree
from luceasync.kernels.tree_delta import delta_big_tree
from luceasync.kernels.trees import trees

KERNEL = 4
DIM = 128  # of keys and values
STEP, THREE, ONE = "decode step", "verify, three launches", "verify, one launch"
ALONE = "nothing"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's Gated DeltaNet, `count` times."""

    name: str
    hidden: int
    num_key_heads: int
    num_heads: int
    count: int

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return (2 * self.num_key_heads + self.num_heads) * DIM

    @property
    def width(self) -> int:
        """Of the projection."""
        return self.channels + self.num_heads * DIM + 2 * self.num_heads


SHAPES = (Shape("qwen3.5-27b", 5120, 16, 48, 48), Shape("qwen3.5-4b", 2560, 16, 32, 24))


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights and the lanes' states, as luceasync.kernels.delta.delta_step takes them."""

    small: tuple[Tensor, Tensor, Tensor, Tensor, float]
    states: tuple[Tensor, Tensor]


def new_layer(shape: Shape, num_lanes: int) -> Layer:
    """A layer of random numbers; its states shrink, so that many steps leave them finite."""
    new = partial(torch.randn, device="cuda")
    decay_rate = -new(shape.num_heads).exp()
    small = (new(shape.channels, KERNEL), decay_rate, new(shape.num_heads), new(DIM), 1e-6)
    conv_state = new(num_lanes, KERNEL - 1, shape.channels, dtype=torch.bfloat16)
    return Layer(small, (conv_state, new(num_lanes, shape.num_heads, DIM, DIM)))


def chains(shape: Shape, num_lanes: int, num_rows: int) -> dict[str, Run]:
    """Every way through all layers, by itself and between products."""
    layers = [new_layer(shape, num_lanes) for _ in range(shape.count)]
    lanes = torch.arange(num_lanes, dtype=torch.int32, device="cuda")
    parents = torch.arange(-1, num_rows - 1, dtype=torch.int32, device="cuda")
    ancestors, _, taps = trees(parents.expand(num_lanes, -1), KERNEL)
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    projected = new(num_lanes, num_rows, shape.width)
    rows = (num_lanes, num_rows)
    scratch = (
        new(*rows, shape.channels),
        torch.empty(*rows, shape.num_key_heads, DIM, device="cuda"),
        torch.empty(*rows, shape.num_heads, DIM, device="cuda"),
        torch.empty(*rows, shape.num_heads, device="cuda"),
    )
    rest = {"num_key_heads": shape.num_key_heads}

    def step(layer: Layer) -> None:
        delta_step(projected[:, 0], *layer.small, *layer.states, lanes, **rest)

    def tree(run: Callable[..., Tensor], layer: Layer) -> None:
        shared = (lanes, ancestors, taps, scratch)
        run(projected, *layer.small, *layer.states, *shared, **rest)

    mixers = {
        STEP: step,
        THREE: partial(tree, delta_big_tree),
        ONE: partial(tree, delta_small_tree),
    }
    found: dict[str, Run] = {}
    for name, mixer in mixers.items():
        found[name] = captured(lambda mixer=mixer: [mixer(layer) for layer in layers])
    for count, names in ((1, (STEP,)), (num_rows, (THREE, ONE))):
        product = products(shape, num_lanes * count)
        for name in (ALONE, *names):
            run = partial(alternate, layers, mixers.get(name), product)
            found[f"{count}: {name}"] = captured(run)
    return found


def alternate(
    layers: list[Layer], mixer: Callable[[Layer], None] | None, product: Callable[[int], object]
) -> None:
    """A product before each layer's mixer."""
    for index, layer in enumerate(layers):
        product(index)
        if mixer is not None:
            mixer(layer)


def products(shape: Shape, num_rows: int) -> Callable[[int], object]:
    """The projection of a layer's rows, with one of so many weights that no cache holds them."""
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    copies = num_copies(2 * shape.width * shape.hidden)
    weights = [new(shape.width, shape.hidden) for _ in range(copies)]
    x = new(num_rows, shape.hidden)
    multiply = gemv.linear if num_rows == 1 else small_gemm.linear
    return lambda index: multiply(x, weights[index % copies])


def compare(report: Report, shape: Shape, num_lanes: int, num_rows: int, num_rounds: int) -> None:
    runs = chains(shape, num_lanes, num_rows)
    found = medians(measure(runs, num_rounds, num_warmups=2, clock=by_events))
    title = f"{shape.name}, lanes: {num_lanes}, rows of each: {num_rows}"
    table = report.table(("", "us a layer", "us a layer, between products"), title)
    for name, count in ((STEP, 1), (THREE, num_rows), (ONE, num_rows)):
        between = found[f"{count}: {name}"] - found[f"{count}: {ALONE}"]
        each = (figure(s / shape.count * 1e6, digits=2) for s in (found[name], between))
        table.add(name, *each)


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=15)
    parser.add_argument("--rows", type=command.numbers, default="4,16")
    parser.add_argument("--lanes", type=command.numbers, default="1,4")
    options = parser.parse_args()
    report = command.begin(options, ["cuda:0"])
    for shape, lanes, rows in itertools.product(SHAPES, options.lanes, options.rows):
        compare(report, shape, lanes, rows, options.rounds)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
