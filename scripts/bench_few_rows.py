"""Products of a few dozen rows with big weights on a GPU: our kernels beside the library's.

    python -m scripts.bench_few_rows [--rows 9,16,22,32,48,64]

Each product runs as a chain of launches in a CUDA graph, over more weights than the L2 cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.bench import command
from luceasync.bench.device import by_events, captured, num_copies
from luceasync.bench.figures import medians
from luceasync.bench.report import Cell
from luceasync.bench.rounds import measure
from luceasync.kernels import rows as row_kernels
from luceasync.kernels import small_gemm


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
            return small_gemm.swiglu(x, weight)
        return small_gemm.linear(x, weight, residual if self.after == "residual" else None)


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
    """Measure and print: microseconds of one launch, the library's and ours."""
    parser = command.parser(__doc__, rounds=7)
    parser.add_argument("--rows", type=command.numbers, default="9,16,22,32,48,64")
    options = parser.parse_args()
    report = command.begin(options, ["cuda:0"])
    table = report.table(["product", *(f"{count} rows" for count in options.rows)])
    for product in PRODUCTS:
        cells = [compare(product, count, options.rounds) for count in options.rows]
        table.add(f"{product.name} {product.outputs} x {product.dim}", *cells)


@torch.inference_mode()
def compare(product: Product, num_rows: int, num_rounds: int) -> Cell:
    """'library, ours' in us; the figure is their ratio."""
    copies = num_copies(2 * product.outputs * product.dim)
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

        return captured(run)

    chains = {"library": chain(product.library), "ours": chain(product.ours)}
    seconds = medians(measure(chains, num_rounds, num_warmups=2, clock=by_events))
    text = ", ".join(f"{each / copies * 1e6:.1f}" for each in seconds.values())
    return Cell(seconds["library"] / seconds["ours"], text)


if __name__ == "__main__":
    main()
