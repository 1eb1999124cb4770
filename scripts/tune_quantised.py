"""Find how quantised products are best divided on this GPU: for every shape the best few.

    python -m scripts.tune_quantised [--rows 1,16] [--cases FILTER] [--triton] [--json FILE]

Shares of luceasync.kernels.quant_gemv_cuda; with --triton, and where that does not run, tiles of
luceasync.kernels.quant_gemv. A candidate runs in the layer that it is of, whose products overlap
with it, layer after layer in a CUDA graph: what is fastest alone need not be.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from luceasync.bench import command
from luceasync.bench.device import by_events, captured, num_copies
from luceasync.bench.figures import median
from luceasync.bench.report import Report, figure
from luceasync.bench.rounds import measure
from luceasync.kernels import quant_gemv, quant_gemv_cuda
from luceasync.kernels.prepared_rows import MOST_PLAIN
from luceasync.kernels.quant_gemv import Tile
from luceasync.kernels.quant_tiles import Tiled
from luceasync.kernels.quant_tiling import Share
from luceasync.models.precision import Precision
from luceasync.models.quant.ggml import FORMS
from luceasync.models.quant.random import random_packed
from luceasync.models.quant.tiles import tile

NUM_REPLAYS = 5
NUM_SHOWN = 5  # of the candidates, for people
SMALL_ROWS = 2048  # of a weight that a kernel is compiled with


@dataclass(frozen=True)
class Case:
    """A weight [outputs (twice that if paired), dim] of a type. Its product `adds` a residual, or
    takes rows that are normed.
    """

    type: str
    outputs: int
    dim: int
    paired: bool = False
    adds: bool = False

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.paired else 1)

    @property
    def name(self) -> str:
        pair = ", paired" if self.paired else ""
        adds = ", residual" if self.adds else ""
        return f"{self.type} {self.weight_rows} x {self.dim}{pair}{adds}"


@dataclass(frozen=True)
class Norm:
    """See luceasync.kernels.prepared_rows.RowNorm."""

    weight: torch.Tensor
    eps: float = 1e-6


Layer = tuple[Case, ...]  # products that follow each other


def layer_of(types: tuple[str, str, str, str], mixed: int, joined: int, hidden: int) -> Layer:
    """What tokens are mixed from and with, gate and up, down: one layer's."""
    inner = {5120: 17408, 2560: 9728}[hidden]
    mix, join, gate_up, down = types
    return (
        Case(mix, mixed, hidden),
        Case(join, hidden, joined, adds=True),
        Case(gate_up, inner, hidden, paired=True),
        Case(down, hidden, inner, adds=True),
    )


LAYERS: tuple[Layer, ...] = (
    layer_of(("Q5_K", "Q4_K", "Q4_K", "Q4_K"), 10240, 6144, 5120),
    layer_of(("Q4_K", "Q4_K", "Q4_K", "Q6_K"), 6240, 6144, 5120),
    layer_of(("Q4_K", "Q4_K", "Q4_K", "Q4_K"), 6144, 4096, 2560),
    layer_of(("Q8_0", "Q8_0", "Q8_0", "Q8_0"), 6144, 4096, 2560),
    (Case("Q4_K", 13312, 5120),),
    (Case("Q6_K", 1024, 5120),),
    (Case("Q6_K", 248320, 5120),),
    (Case("Q4_K", 151936, 2560),),
    (Case("Q8_0", 151936, 2560),),
)


@dataclass(frozen=True)
class Operands:
    """What a weight is multiplied with, and what is added."""

    x: torch.Tensor
    norm: Norm | None
    residual: torch.Tensor | None


def operands_of(case: Case, num_rows: int) -> Operands:
    x = torch.randn(num_rows, case.dim, device="cuda", dtype=torch.bfloat16)
    norm = None if case.adds else Norm(torch.ones(case.dim, device="cuda"))
    return Operands(x, norm, x.new_zeros(num_rows, case.outputs) if case.adds else None)


class TritonTiles:
    """Tiles of luceasync.kernels.quant_gemv."""

    def candidates(self, case: Case, num_rows: int) -> list[Any]:
        """What is worth a try; tiles that do not fit fail when they are compiled."""
        found = []
        for row_blocks, strides, steps, prefetch in itertools.product(
            (1, 2, 4), (4, 8, 16), (1, 2, 4), (False, True)
        ):
            num_programs = case.weight_rows // (16 * row_blocks)
            is_large = row_blocks * steps * (2 if num_rows > 8 else 1) > 8
            has_too_few = (
                num_programs * strides < min(800, case.weight_rows // 4)
                or strides * steps > case.dim // 128
            )
            if (case.paired and row_blocks == 1) or is_large or has_too_few:
                continue
            if prefetch and (strides != 8 or steps == 4):
                continue
            found.append(Tile(row_blocks, strides, steps, prefetch=prefetch))
        return found

    def run(self, case: Case, chosen: Tile | None, weight: Tiled, given: Operands) -> None:
        if case.paired:
            quant_gemv.swiglu(given.x, weight, chosen=chosen)
        else:
            quant_gemv.linear(given.x, weight, given.residual, chosen=chosen)

    def kernel_of(self, case: Case, chosen: Tile, num_rows: int) -> tuple[object, ...]:
        """What differs in nothing but its sizes is one kernel."""
        step = chosen.steps * chosen.strides * chosen.num_splits
        alike = replace(chosen, num_splits=min(chosen.num_splits, 2))
        return case.type, case.paired, alike, num_rows, case.dim // 64 % step == 0


class CudaShares:
    """Shares of luceasync.kernels.quant_gemv_cuda."""

    def candidates(self, case: Case, num_rows: int) -> list[Any]:
        """What is worth a try; shares that do not fit fail when they are loaded."""
        num_units = -(-case.dim // 256)
        found = []
        for row_blocks, warps, stages, splits in itertools.product(
            (1, 2, 4), (1, 2, 3, 4, 5, 6, 8, 10, 16), (2, 3, 4), (1, 2, 4)
        ):
            has_few_warps = warps * splits < 4 and case.outputs // row_blocks < 6400
            is_large = num_rows > 1 and (stages == 4 or warps > 10)
            if (case.paired and row_blocks == 1) or (row_blocks == 4 and num_rows == 1):
                continue
            if not has_few_warps and not is_large and warps * splits <= num_units:
                found.append(Share(row_blocks, warps, stages, splits))
        go_on = [replace(share, goes_on=True) for share in found if share.splits == 1]
        return [*found, *go_on] if num_rows > MOST_PLAIN else found

    def run(self, case: Case, chosen: Share | None, weight: Tiled, given: Operands) -> None:
        if case.paired:
            quant_gemv_cuda.swiglu(given.x, weight, norm=given.norm, chosen=chosen)
        else:
            quant_gemv_cuda.linear(given.x, weight, given.residual, norm=given.norm, chosen=chosen)

    def kernel_of(self, case: Case, chosen: Share, num_rows: int) -> tuple[object, ...]:
        """What differs in nothing but its sizes is one program."""
        return case.type, case.paired, chosen, num_rows


Body = TritonTiles | CudaShares


def weight_of(case: Case) -> Tiled:
    generator = torch.Generator("cuda")
    return tile(random_packed(FORMS[case.type], (case.weight_rows, case.dim), generator))


def compile_one(work: tuple[Body, Case, Any, int]) -> str:
    """Fills the compilers' cache on disk; what kept it from being compiled."""
    body, case, chosen, num_rows = work
    small = replace(case, outputs=SMALL_ROWS)
    try:
        body.run(small, chosen, weight_of(small), operands_of(small, num_rows))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-200:]}"
    return ""


class Chain:
    """Layers one after the other, over more weights than the L2 cache holds."""

    def __init__(self, body: Body, layer: Layer, num_rows: int) -> None:
        self._body, self._layer = body, layer
        bytes_each = sum(bytes_of(case) for case in layer)
        num_layers = num_copies(bytes_each, 300_000_000)
        self._weights = [[weight_of(case) for case in layer] for _ in range(num_layers)]
        self._operands = [operands_of(case, num_rows) for case in layer]

    def seconds(self, chosen: dict[Case, Any]) -> float:
        """Of a layer; products that nothing is `chosen` for are divided as the rule has it."""

        def run() -> None:
            for weights in self._weights:
                for case, weight, given in zip(self._layer, weights, self._operands, strict=True):
                    self._body.run(case, chosen.get(case), weight, given)

        timed = measure({"": captured(run)}, NUM_REPLAYS, clock=by_events)
        return median(timed[""]) / len(self._weights)


def bytes_of(case: Case) -> int:
    return FORMS[case.type].num_bytes((case.weight_rows, case.dim), Precision.of("bf16"))


def tune(
    report: Report, chain: Chain, layer: Layer, case: Case, num_rows: int, candidates: list[Any]
) -> None:
    """Print the best, keep all."""
    ruled_s, found = chain.seconds({}), []
    for chosen in candidates:
        seconds = chain.seconds({case: chosen})
        found.append((seconds, chosen))
        report.keep({**asdict(case), "rows": num_rows, "us": seconds * 1e6, **asdict(chosen)})
    in_layer = "" if len(layer) == 1 else " in its layer"
    table = report.table(
        ("divided as", "us", "to the rule"), f"{case.name}{in_layer}, {num_rows} rows"
    )
    table.add("by the rule", figure(ruled_s * 1e6, digits=1), figure(1.0, digits=3))
    for seconds, chosen in sorted(found, key=lambda each: each[0])[:NUM_SHOWN]:
        table.add(
            str(chosen).removeprefix(type(chosen).__name__),
            figure(seconds * 1e6, digits=1),
            figure(seconds / ruled_s, digits=3),
        )


def main() -> None:
    """Compile in parallel, then measure one by one."""
    parser = command.parser(__doc__)
    parser.add_argument("--rows", type=command.numbers, default="1,16")
    parser.add_argument("--cases", default="", help="only cases whose names have this")
    parser.add_argument("--triton", action="store_true", help="Triton's kernels, wherever it runs")
    options = parser.parse_args()
    if not torch.backends.cuda.is_built():  # asking for the GPU itself would touch it
        raise SystemExit("tune_quantised.py: a GPU is needed; this torch build knows none")
    cases = [(layer, case) for layer in LAYERS for case in layer if options.cases in case.name]
    rows = options.rows
    is_triton = options.triton or torch.version.hip is not None
    body: Body = TritonTiles() if is_triton else CudaShares()
    kernels = {
        body.kernel_of(case, chosen, n): (body, case, chosen, n)
        for _, case in cases
        for n in rows
        for chosen in body.candidates(case, n)
    }
    started = time.perf_counter()
    workers = min(16, os.cpu_count() or 1)
    # Forked before this process touches the GPU: the children import nothing again.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        faults = dict(zip(kernels, pool.map(compile_one, kernels.values()), strict=True))
    report = command.begin(options, ["cuda:0"])
    seconds = time.perf_counter() - started
    failed = {fault for fault in faults.values() if fault}
    report.say(f"{len(kernels)} kernels compiled in {seconds:.0f} s; {failed or 'none'} failed")
    for layer, num_rows in itertools.product(dict.fromkeys(layer for layer, _ in cases), rows):
        chain = Chain(body, layer, num_rows)
        for case in [case for of, case in cases if of == layer]:
            fine = [
                chosen
                for chosen in body.candidates(case, num_rows)
                if not faults[body.kernel_of(case, chosen, num_rows)]
            ]
            tune(report, chain, layer, case, num_rows, fine)


if __name__ == "__main__":
    main()
