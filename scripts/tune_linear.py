"""Find the tiles of luceasync.kernels.linear on this GPU: for every shape the best few.

    python scripts/tune_linear.py [--out FILE]

A candidate runs as a chain of launches in a CUDA graph, over more weights than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch

from luceasync.kernels.linear import Tile, linear, swiglu
from luceasync.kernels.rows import rms_norm

COPY_BYTES_PER_S = 4.24e12
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
    copies = max(3, -(-400_000_000 // weight_bytes))
    weights = torch.randn(copies, case.weight_rows, case.dim, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_rows, case.dim, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(case.dim, device="cuda")
    residual = x.new_zeros(num_rows, case.outputs)

    run(case, tile, x, weights[0], norm, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(case, tile, x, weight, norm, residual)
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / copies)
    return sorted(times)[len(times) // 2]


def tune(case: Case, num_rows: int) -> list[tuple[float, Tile]]:
    """(share of the copy bandwidth, tile), best first."""
    weight_bytes = case.weight_rows * case.dim * 2

    def share(tile: Tile) -> float:
        return weight_bytes / seconds_each(case, tile, num_rows) / COPY_BYTES_PER_S

    ranked = sorted(((share(t), t) for t in candidates(case)), key=lambda r: -r[0])
    preloading = [replace(t, preload=True) for _, t in ranked[:8]]
    return sorted(ranked + [(share(t), t) for t in preloading], key=lambda r: -r[0])


def main() -> None:
    """Compile in parallel, then measure one by one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    kinds = {(c.normed, c.paired): c for c in CASES}
    work = [(case, tile) for case in kinds.values() for tile in candidates(case)]
    workers = min(12, os.cpu_count() or 1)
    # Forked before this process touches the GPU: the children import nothing again.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(compile_one, work, chunksize=2))
    results = {}
    for case, num_rows in itertools.product(CASES, (1, 16)):
        ranked = tune(case, num_rows)
        name = f"{case.name} [{case.weight_rows}, {case.dim}], {num_rows} rows"
        results[name] = [(share, asdict(tile)) for share, tile in ranked]
        print(name, flush=True)
        for share, tile in ranked[:6]:
            print(f"  {share:6.1%}  {tile}", flush=True)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
