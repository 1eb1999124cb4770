"""Find the tiles of luceasync.kernels.grouped_rows on this GPU: for every shape the best few.

    python -m scripts.tune_quantised [--rows 1,16] [--cases FILTER] [--json FILE]

A candidate runs as a chain of launches in a CUDA graph, over more weights than the L2 cache holds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch

from luceasync.bench import command
from luceasync.bench.device import by_events, captured, copy_bandwidth, num_copies
from luceasync.bench.figures import median
from luceasync.bench.report import Report, figure, share
from luceasync.bench.rounds import measure
from luceasync.kernels.grouped_rows import Tile, Tiled, linear, swiglu
from luceasync.models.grouped.ggml import FORMS
from luceasync.models.grouped.random import random_packed
from luceasync.models.grouped.tiles import tile
from luceasync.models.precision import Precision

NUM_REPLAYS = 5
NUM_SHOWN = 5  # of the candidates, for people
SMALL_ROWS = 2048  # of a weight that a kernel is compiled with


@dataclass(frozen=True)
class Case:
    """A weight [outputs (twice that if paired), dim] of a type."""

    type: str
    outputs: int
    dim: int
    paired: bool = False

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.paired else 1)

    @property
    def name(self) -> str:
        pair = ", paired" if self.paired else ""
        return f"{self.type} {self.weight_rows} x {self.dim}{pair}"


CASES = (
    Case("Q4_K", 17408, 5120, paired=True),
    Case("Q4_K", 5120, 17408),
    Case("Q6_K", 5120, 17408),
    Case("Q5_K", 10240, 5120),
    Case("Q4_K", 6240, 5120),
    Case("Q4_K", 5120, 6144),
    Case("Q4_K", 13312, 5120),
    Case("Q6_K", 1024, 5120),
    Case("Q6_K", 248320, 5120),
    Case("Q4_K", 9728, 2560, paired=True),
    Case("Q4_K", 2560, 9728),
    Case("Q4_K", 6144, 2560),
    Case("Q4_K", 2560, 4096),
    Case("Q4_K", 151936, 2560),
    Case("Q8_0", 9728, 2560, paired=True),
    Case("Q8_0", 2560, 9728),
    Case("Q8_0", 6144, 2560),
    Case("Q8_0", 2560, 4096),
    Case("Q8_0", 151936, 2560),
)


def candidates(case: Case, num_rows: int) -> list[Tile]:
    """Tiles that are worth a try; those that do not fit fail when they are compiled."""
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


def run(case: Case, tile: Tile, x: torch.Tensor, weight: Tiled, residual: torch.Tensor) -> None:
    if case.paired:
        swiglu(x, weight, chosen=tile)
    else:
        linear(x, weight, residual, chosen=tile)


def weight_of(case: Case) -> Tiled:
    generator = torch.Generator("cuda")
    return tile(random_packed(FORMS[case.type], (case.weight_rows, case.dim), generator))


def compile_one(work: tuple[Case, Tile, int]) -> str:
    """Fills Triton's cache on disk; what kept it from being compiled."""
    case, chosen, num_rows = work
    small = replace(case, outputs=SMALL_ROWS)
    x = torch.zeros(num_rows, case.dim, dtype=torch.bfloat16, device="cuda")
    try:
        run(small, chosen, x, weight_of(small), x.new_zeros(num_rows, SMALL_ROWS))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-200:]}"
    return ""


def kernel_of(case: Case, chosen: Tile, num_rows: int) -> tuple[object, ...]:
    """What differs in nothing but its sizes is one kernel."""
    step = chosen.steps * chosen.strides * chosen.num_splits
    alike = replace(chosen, num_splits=min(chosen.num_splits, 2))
    return case.type, case.paired, alike, num_rows, case.dim // 64 % step == 0


def seconds_each(case: Case, chosen: Tile, num_rows: int, weights: list[Tiled]) -> float:
    """Of one launch in a chain."""
    x = torch.randn(num_rows, case.dim, device="cuda", dtype=torch.bfloat16)
    residual = x.new_zeros(num_rows, case.outputs)

    def chain() -> None:
        for weight in weights:
            run(case, chosen, x, weight, residual)

    return median(measure({"": captured(chain)}, NUM_REPLAYS, clock=by_events)[""]) / len(weights)


def tune(report: Report, case: Case, num_rows: int, tiles: list[Tile], peak: float) -> None:
    """Print the best, keep all."""
    num_bytes = FORMS[case.type].num_bytes((case.weight_rows, case.dim), Precision.of("bf16"))
    weights = [weight_of(case) for _ in range(num_copies(num_bytes, 300_000_000))]
    found = []
    for chosen in tiles:
        seconds = seconds_each(case, chosen, num_rows, weights)
        rate = num_bytes / seconds
        found.append((rate, chosen))
        report.keep({**asdict(case), "rows": num_rows, "GB/s": rate / 1e9, **asdict(chosen)})
    table = report.table(("tile", "us", "GB/s", "of the copy"), f"{case.name}, {num_rows} rows")
    for rate, chosen in sorted(found, key=lambda each: -each[0])[:NUM_SHOWN]:
        table.add(
            str(chosen).removeprefix("Tile"),
            figure(num_bytes / rate * 1e6, digits=1),
            figure(rate / 1e9, digits=0),
            share(rate / peak),
        )


def main() -> None:
    """Compile in parallel, then measure one by one."""
    parser = command.parser(__doc__)
    parser.add_argument("--rows", type=command.numbers, default="1,16")
    parser.add_argument("--cases", default="", help="only cases whose names have this")
    options = parser.parse_args()
    if not torch.backends.cuda.is_built():  # asking for the GPU itself would touch it
        raise SystemExit("tune_quantised.py: a GPU is needed; this torch build knows none")
    cases = [case for case in CASES if options.cases in case.name]
    rows = options.rows
    kernels = {
        kernel_of(case, chosen, n): (case, chosen, n)
        for case in cases
        for n in rows
        for chosen in candidates(case, n)
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
    peak = copy_bandwidth("cuda:0")
    for case, num_rows in itertools.product(cases, rows):
        tiles = [
            chosen
            for chosen in candidates(case, num_rows)
            if not faults[kernel_of(case, chosen, num_rows)]
        ]
        tune(report, case, num_rows, tiles, peak)


if __name__ == "__main__":
    main()
