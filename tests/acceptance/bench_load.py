"""Loading experts to a CPU beside a plain read of the same file, neither from the page cache.

    python -m tests.acceptance.bench_load [--gb 3] [--folder DIR] [--formats Q4_K_M,bf16]

Random weights: a GGUF file in Q4_K_M's types, and safetensors with a tensor for each expert. Beside
a plain read of 8 MiB at a time, and one into new memory by all cores that keeps all bytes, as a
load must. Prints bytes planned and loaded, medians of rates and of each turn's ratios.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does, before torch

import argparse
import json
import mmap
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from luceasync.bench.report import median
from luceasync.models.files import ModelFiles, parse_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import Plan, make_plan
from tests import tiny
from tests.acceptance import bench_experts

READ_BYTES = 8 << 20
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


def write_gguf(folder: Path, num_bytes: int) -> Path:
    """A file of about so many bytes."""
    layer_bytes = 3 * bench_experts.EXPERTS * bench_experts.INNER * bench_experts.HIDDEN * 0.6
    return bench_experts.write(folder, max(1, int(num_bytes / layer_bytes)))


def write_safetensors(folder: Path, num_bytes: int) -> Path:
    """A directory of about so many bytes, a tensor for each matrix of each expert."""
    folder.mkdir()
    layer_bytes = 3 * 2 * CONFIG["num_experts"] * CONFIG["moe_intermediate_size"] * 2048
    config = CONFIG | {"num_hidden_layers": max(1, num_bytes // layer_bytes)}
    (folder / "config.json").write_text(json.dumps(config))
    at, header = 0, {}
    for name, shape in parse_spec(config).shapes().items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = (torch.randn(1 << 22) * 0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, at, len(block)):
            file.write(block[: at - begin])
    return folder


def plan_of(files: ModelFiles) -> Plan:
    return make_plan(
        files.spec,
        [offer_of("cpu:0", 1 << 36)],
        precision=Precision.of("bf16"),
        weights=None,
        parallel=1,
        max_ctx_tokens=256,
        prefill_chunk_tokens=None,
        encoding_of=files.weights.encoding,
    )


def forget(path: Path) -> None:
    """Have the system drop what it keeps of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(path: Path) -> None:
    buffer = bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def read_into_new_memory(path: Path) -> None:
    """Read the file into memory that the process has not used before."""
    size = path.stat().st_size
    with (
        path.open("rb", buffering=0) as file,
        mmap.mmap(-1, size) as memory,
        memoryview(memory) as view,
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):

        def read(begin: int) -> None:
            with view[begin : begin + READ_BYTES] as part:
                assert os.preadv(file.fileno(), [part], begin) == len(part)

        list(threads.map(read, range(0, size, READ_BYTES)))


def timed(path: Path, run: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of the processor, with nothing of the file in memory before."""
    forget(path)
    begin, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begin, time.process_time() - busy


def loaded_bytes(files: ModelFiles, plan: Plan) -> int:
    """Load, and say how many bytes the device holds then."""
    backend = LayerSplitBackend.open(files, plan)
    [stage] = backend._stages
    [num_bytes] = stage.device_bytes.values()
    backend.close()
    return num_bytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--formats", default="Q4_K_M,bf16")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    columns = "experts, file, planned, loaded, plain read, into new memory, load, load / read"
    print(f"| {columns.replace(', ', ' | ')} | load / new memory |")
    print("|---" * 9 + "|")
    for name in options.formats.split(","):
        write = {"Q4_K_M": write_gguf, "bf16": write_safetensors}[name]
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            files = ModelFiles(write(Path(folder) / "model", int(options.gb * 1e9)))
            print(f"| {name} | {' | '.join(measure(files, options.rounds))} |", flush=True)


def measure(files: ModelFiles, rounds: int) -> list[str]:
    """The cells of a row."""
    [path] = files.weights.paths
    plan, size = plan_of(files), path.stat().st_size
    [shard] = plan.shards
    found = loaded_bytes(files, plan)
    runs: list[Callable[[], object]] = [
        partial(plain_read, path),
        partial(read_into_new_memory, path),
        partial(loaded_bytes, files, plan),
    ]
    turns = [[timed(path, run) for run in runs] for _ in range(rounds)]
    cells = [f"{each / 1e9:.4f} GB" for each in (size, plan.device_bytes(shard), found)]
    for run in zip(*turns, strict=True):
        seconds, busy = (median(list(each)) for each in zip(*run, strict=True))
        cells.append(f"{size / seconds / 1e9:.2f} GB/s, {busy:.1f} s")
    for base in (0, 1):
        cells.append(f"{median([turn[base][0] / turn[2][0] for turn in turns]):.0%}")
    return cells


if __name__ == "__main__":
    main()
