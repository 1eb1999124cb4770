"""Products of a few dozen rows with big weights on a GPU: our kernels beside the library's.

    python -m scripts.bench_few_rows [--rows 9,16,22,32,48,64]

Each product runs as a chain of launches in a CUDA graph, over more weights than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import few_rows
from luceasync.kernels import rows as row_kernels

CHAIN_BYTES = 400_000_000  # of the weights of one chain, at least
NUM_REPLAYS = 9


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [outputs, dim], and what follows: nothing, a residual to add, or SwiGLU."""

    name: str
    outputs: int
    dim: int
    after: str = ""

    def library(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        if self.after == "residual":
            return residual.addmm_(x, weight.t())
        out = F.linear(x, weight)
        return row_kernels.swiglu(out) if self.after == "swiglu" else out

    def ours(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        if self.after == "swiglu":
            return few_rows.swiglu(x, weight)
        return few_rows.linear(x, weight, residual if self.after == "residual" else None)


PRODUCTS = (
    Product("attention projection", 6144, 2560),
    Product("gated attention projection", 10240, 2560),
    Product("delta projection", 12352, 2560),
    Product("attention output", 2560, 4096, "residual"),
    Product("mlp gate and up", 19456, 2560, "swiglu"),
    Product("mlp down", 2560, 9728, "residual"),
    Product("head", 151936, 2560),
    Product("mlp gate and up of 8B", 24576, 4096, "swiglu"),
    Product("mlp down of 8B", 4096, 12288, "residual"),
)


def main() -> None:
    """Measure and print a table in Markdown: microseconds, the library's and ours."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="9,16,22,32,48,64")
    row_counts = [int(text) for text in parser.parse_args().rows.split(",")]
    print("| product | " + " | ".join(f"{count} rows" for count in row_counts) + " |")
    print("|---" * (1 + len(row_counts)) + "|")
    for product in PRODUCTS:
        print(f"| {product.name} {product.outputs} x {product.dim} | ", end="")
        print(" | ".join(measure(product, count) for count in row_counts) + " |", flush=True)


@torch.inference_mode()
def measure(product: Product, num_rows: int) -> str:
    """'library, ours' in us."""
    copies = max(3, -(-CHAIN_BYTES // (2 * product.outputs * product.dim)))
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    weights = [
        torch.randn(product.outputs, product.dim, **kind).mul_(product.dim**-0.5)
        for _ in range(copies)
    ]
    x = torch.randn(num_rows, product.dim, **kind)
    residual = torch.randn(num_rows, product.outputs, **kind)

    def chain(multiply: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                multiply(x, weight, residual)

        return run

    times = [graph_us(chain(each)) / copies for each in (product.library, product.ours)]
    return ", ".join(f"{us:.1f}" for us in times)


def graph_us(run: Callable[[], None]) -> float:
    """Median of the replays of `run` as a CUDA graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(NUM_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
