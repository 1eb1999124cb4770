"""Find the tiles of luceasync.kernels.gemv on this GPU: for every shape the best few.

    python scripts/tune_linear.py [--json FILE]

A candidate runs as a chain of launches in a CUDA graph, over more weights than the L2 cache holds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch

from luceasync.bench import command
from luceasync.bench.device import by_events, captured, copy_bandwidth, num_copies
from luceasync.bench.figures import median
from luceasync.bench.report import share
from luceasync.bench.rounds import measure
from luceasync.kernels.gemv import Tile, linear, swiglu
from luceasync.kernels.rows import rms_norm

NUM_REPLAYS = 7
NUM_SHOWN = 6  # of the candidates, for people
SHARED_BYTES = 200 * 1024  # of one program


@dataclass(frozen=True)
class Case:
    """A weight [outputs (twice that if paired), dim]."""

    name: str
    outputs: int
    dim: int
    normed: bool
    paired: bool

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.paired else 1)


CASES = [
    Case("attention projection", 6144, 2560, True, False),
    Case("gated attention projection", 10240, 2560, True, False),
    Case("delta projection", 12352, 2560, True, False),
    Case("attention output", 2560, 4096, False, False),
    Case("mlp down", 2560, 9728, False, False),
    Case("mlp gate and up", 9728, 2560, True, True),
    Case("head", 151936, 2560, True, False),
]


SLICES = ((64, 4, 4), (128, 4, 4), (64, 2, 2))  # block_k, split, num_warps


def candidates(case: Case) -> list[Tile]:
    """Tiles whose pipeline fits the shared memory and is deep enough to be worth a try."""
    found = []
    for block_n, (block_k, split, warps), stages in itertools.product(
        (16, 32, 64), SLICES, (3, 4, 5)
    ):
        stage_bytes = 2 * block_k * split * (block_n * (2 if case.paired else 1) + 16)
        if 32 * 1024 <= stage_bytes * stages <= SHARED_BYTES:
            found.append(Tile(block_n, block_k, split, warps, stages, preload=False))
    return found


def run(
    case: Case,
    tile: Tile,
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    if case.normed:
        x = rms_norm(x, norm, 1e-6)
    if case.paired:
        swiglu(x, weight, chosen=tile)
    else:
        linear(x, weight, None if case.normed else residual, chosen=tile)


def compile_one(work: tuple[Case, Tile]) -> None:
    """Fills Triton's cache on disk."""
    case, tile = work
    small = replace(case, outputs=512)
    x = torch.zeros(1, case.dim, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(small.weight_rows, case.dim, dtype=torch.bfloat16, device="cuda")
    residual = x.new_zeros(1, 512)
    run(small, tile, x, weight, torch.ones(case.dim, device="cuda"), residual)
    torch.cuda.synchronize()


def seconds_each(case: Case, tile: Tile, num_rows: int) -> float:
    """Of one launch in a chain."""
    weight_bytes = case.weight_rows * case.dim * 2
    copies = num_copies(weight_bytes)
    weights = torch.randn(copies, case.weight_rows, case.dim, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_rows, case.dim, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(case.dim, device="cuda")
    residual = x.new_zeros(num_rows, case.outputs)

    def chain() -> None:
        for weight in weights:
            run(case, tile, x, weight, norm, residual)

    replays = measure({"": captured(chain)}, NUM_REPLAYS, clock=by_events)
    return median(replays[""]) / copies


def tune(case: Case, num_rows: int, copy_bytes_per_s: float) -> list[tuple[float, Tile]]:
    """(share of the copy bandwidth, tile), best first."""
    weight_bytes = case.weight_rows * case.dim * 2

    def share(tile: Tile) -> float:
        return weight_bytes / seconds_each(case, tile, num_rows) / copy_bytes_per_s

    ranked = sorted(((share(t), t) for t in candidates(case)), key=lambda r: -r[0])
    preloading = [replace(t, preload=True) for _, t in ranked[:8]]
    return sorted(ranked + [(share(t), t) for t in preloading], key=lambda r: -r[0])


def main() -> None:
    """Compile in parallel, then measure one by one."""
    options = command.parser(__doc__).parse_args()
    if not torch.backends.cuda.is_built():  # asking for the GPU itself would touch it
        raise SystemExit("tune_linear.py: a GPU is needed; this torch build knows none")
    kinds = {(c.normed, c.paired): c for c in CASES}
    work = [(case, tile) for case in kinds.values() for tile in candidates(case)]
    workers = min(12, os.cpu_count() or 1)
    # Forked before this process touches the GPU: the children import nothing again.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(compile_one, work, chunksize=2))
    report = command.begin(options, ["cuda:0"])
    copy_bytes_per_s = copy_bandwidth("cuda:0")
    for case, num_rows in itertools.product(CASES, (1, 16)):
        ranked = tune(case, num_rows, copy_bytes_per_s)
        name = f"{case.name} [{case.weight_rows}, {case.dim}], {num_rows} rows"
        table = report.table(("tile", "of the copy bandwidth"), name)
        for part, tile in ranked[:NUM_SHOWN]:
            table.add(str(tile), share(part))
        for part, tile in ranked:
            report.keep({"case": name, "share": part, "tile": asdict(tile)})


if __name__ == "__main__":
    main()
