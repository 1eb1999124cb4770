"""Find how quantised products are best divided on this GPU: for every shape the best few.

    python -m scripts.tune_quantised [--rows 1,16] [--cases FILTER] [--triton] [--json FILE]

Shares of luceasync.kernels.grouped_cuda; with --triton, and where that does not run, tiles of
luceasync.kernels.grouped_rows. A candidate runs as a chain of launches in a CUDA graph, over more
weights than the L2 cache holds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from luceasync.bench import command
from luceasync.bench.device import by_events, captured, copy_bandwidth, num_copies
from luceasync.bench.figures import median
from luceasync.bench.report import Report, figure, share
from luceasync.bench.rounds import measure
from luceasync.kernels import grouped_cuda, grouped_rows
from luceasync.kernels.grouped_rows import Tile
from luceasync.kernels.grouped_share import Share
from luceasync.kernels.grouped_tiled import Tiled
from luceasync.kernels.prepared_rows import MOST_PLAIN, Arranged, RowNorm, prepared
from luceasync.models.grouped.ggml import FORMS
from luceasync.models.grouped.random import random_packed
from luceasync.models.grouped.tiles import coding_of, tile
from luceasync.models.precision import Precision

NUM_REPLAYS = 5
NUM_PREPARED = 100  # times, in a chain
NUM_SHOWN = 5  # of the candidates, for people
SMALL_ROWS = 2048  # of a weight that a kernel is compiled with


@dataclass(frozen=True)
class Case:
    """A weight [outputs (twice that if paired), dim] of a type. `normed`: of one row the product
    takes the norm, too, as behind a residual; a residual is added to the results of others.
    """

    type: str
    outputs: int
    dim: int
    paired: bool = False
    normed: bool = True

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.paired else 1)

    @property
    def name(self) -> str:
        pair = ", paired" if self.paired else ""
        norm = ", normed" if self.normed else ""
        return f"{self.type} {self.weight_rows} x {self.dim}{pair}{norm}"


@dataclass(frozen=True)
class Norm:
    """See luceasync.kernels.prepared_rows.RowNorm."""

    weight: torch.Tensor
    eps: float = 1e-6


CASES = (
    Case("Q4_K", 17408, 5120, paired=True),
    Case("Q4_K", 5120, 17408, normed=False),
    Case("Q6_K", 5120, 17408, normed=False),
    Case("Q5_K", 10240, 5120),
    Case("Q4_K", 6240, 5120),
    Case("Q4_K", 5120, 6144, normed=False),
    Case("Q4_K", 13312, 5120),
    Case("Q6_K", 1024, 5120),
    Case("Q6_K", 248320, 5120),
    Case("Q4_K", 9728, 2560, paired=True),
    Case("Q4_K", 2560, 9728, normed=False),
    Case("Q4_K", 6144, 2560),
    Case("Q4_K", 2560, 4096, normed=False),
    Case("Q4_K", 151936, 2560),
    Case("Q8_0", 9728, 2560, paired=True),
    Case("Q8_0", 2560, 9728, normed=False),
    Case("Q8_0", 6144, 2560),
    Case("Q8_0", 2560, 4096, normed=False),
    Case("Q8_0", 151936, 2560),
)


Given = tuple[torch.Tensor | Arranged, RowNorm | None]


class TritonTiles:
    """Tiles of luceasync.kernels.grouped_rows."""

    def candidates(self, case: Case, num_rows: int) -> list[Tile]:
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

    def prepared(self, case: Case, x: torch.Tensor, norm: Norm | None) -> Given:
        """What `run` multiplies: these kernels norm nothing."""
        return x, None

    def run(
        self, case: Case, chosen: Tile, given: Given, weight: Tiled, residual: torch.Tensor
    ) -> None:
        x, _ = given
        assert isinstance(x, torch.Tensor), "rows as they are"
        if case.paired:
            grouped_rows.swiglu(x, weight, chosen=chosen)
        else:
            grouped_rows.linear(x, weight, residual, chosen=chosen)

    def kernel_of(self, case: Case, chosen: Tile, num_rows: int) -> tuple[object, ...]:
        """What differs in nothing but its sizes is one kernel."""
        step = chosen.steps * chosen.strides * chosen.num_splits
        alike = replace(chosen, num_splits=min(chosen.num_splits, 2))
        return case.type, case.paired, alike, num_rows, case.dim // 64 % step == 0


class CudaShares:
    """Shares of luceasync.kernels.grouped_cuda."""

    def candidates(self, case: Case, num_rows: int) -> list[Share]:
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

    def prepared(self, case: Case, x: torch.Tensor, norm: Norm | None) -> Given:
        """What `run` multiplies: more than one row are normed before, more than 8 arranged too."""
        return prepared(x, (coding_of(FORMS[case.type]),), norm)

    def run(
        self, case: Case, chosen: Share, given: Given, weight: Tiled, residual: torch.Tensor
    ) -> None:
        x, norm = given
        if case.paired:
            grouped_cuda.swiglu(x, weight, norm=norm, chosen=chosen)
        else:
            added = None if case.normed else residual
            grouped_cuda.linear(x, weight, added, norm=norm, chosen=chosen)

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
    x = torch.zeros(num_rows, case.dim, dtype=torch.bfloat16, device="cuda")
    try:
        residual = x.new_zeros(num_rows, SMALL_ROWS)
        given = body.prepared(small, x, norm_of(case))
        body.run(small, chosen, given, weight_of(small), residual)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-200:]}"
    return ""


def seconds_each(body: Body, case: Case, chosen: Any, num_rows: int, weights: list[Tiled]) -> float:
    """Of one launch in a chain, of rows that are prepared."""
    x = rows_of(case, num_rows)
    residual = x.new_zeros(num_rows, case.outputs)
    given = body.prepared(case, x, norm_of(case))
    return seconds(lambda i: body.run(case, chosen, given, weights[i], residual), len(weights))


def rows_of(case: Case, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, case.dim, device="cuda", dtype=torch.bfloat16)


def norm_of(case: Case) -> Norm | None:
    return Norm(torch.ones(case.dim, device="cuda")) if case.normed else None


def seconds(launch: Callable[[int], object], num_launches: int) -> float:
    """Of one of them, one after the other in a CUDA graph."""

    def chain() -> None:
        for i in range(num_launches):
            launch(i)

    return median(measure({"": captured(chain)}, NUM_REPLAYS, clock=by_events)[""]) / num_launches


def tune(
    report: Report, body: Body, case: Case, num_rows: int, candidates: list[Any], peak: float
) -> None:
    """Print the best, keep all."""
    num_bytes = FORMS[case.type].num_bytes((case.weight_rows, case.dim), Precision.of("bf16"))
    weights = [weight_of(case) for _ in range(num_copies(num_bytes, 300_000_000))]
    found = []
    for chosen in candidates:
        chosen_s = seconds_each(body, case, chosen, num_rows, weights)
        rate = num_bytes / chosen_s
        found.append((rate, chosen))
        report.keep({**asdict(case), "rows": num_rows, "GB/s": rate / 1e9, **asdict(chosen)})
    table = report.table(
        ("divided as", "us", "GB/s", "of the copy"), f"{case.name}, {num_rows} rows"
    )
    x, norm = rows_of(case, num_rows), norm_of(case)
    if num_rows > MOST_PLAIN:
        prepared_s = seconds(lambda i: body.prepared(case, x, norm), NUM_PREPARED)
        report.say(f"{case.name}: {num_rows} rows are arranged in {prepared_s * 1e6:.1f} us")
    for rate, chosen in sorted(found, key=lambda each: -each[0])[:NUM_SHOWN]:
        table.add(
            str(chosen).removeprefix(type(chosen).__name__),
            figure(num_bytes / rate * 1e6, digits=1),
            figure(rate / 1e9, digits=0),
            share(rate / peak),
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
    cases = [case for case in CASES if options.cases in case.name]
    rows = options.rows
    is_triton = options.triton or torch.version.hip is not None
    body: Body = TritonTiles() if is_triton else CudaShares()
    kernels = {
        body.kernel_of(case, chosen, n): (body, case, chosen, n)
        for case in cases
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
    peak = copy_bandwidth("cuda:0")
    for case, num_rows in itertools.product(cases, rows):
        fine = [
            chosen
            for chosen in body.candidates(case, num_rows)
            if not faults[body.kernel_of(case, chosen, num_rows)]
        ]
        tune(report, body, case, num_rows, fine, peak)


if __name__ == "__main__":
    main()
