"""Loading experts to a CPU beside a plain read of the same file, neither from the page cache.

    python -m tests.acceptance.bench_load [--gb 3] [--folder DIR] [--formats Q4_K_M,bf16]

Random weights: a GGUF file in Q4_K_M's types, and a safetensors file with a tensor for each expert.
The two take turns; a plain read is one of 8 MiB at a time to one buffer. Prints a Markdown table:
bytes planned and loaded, medians of both rates, and the median of each turn's ratio.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does, before torch

import argparse
import json
import struct
import tempfile
import time
from collections.abc import Callable
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
    print("| experts | file | planned | loaded | plain read | load | processor | load / read |")
    print("|---" * 8 + "|")
    for name in options.formats.split(","):
        write = {"Q4_K_M": write_gguf, "bf16": write_safetensors}[name]
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            model = write(Path(folder) / "model", int(options.gb * 1e9))
            files = ModelFiles(model)
            [path] = files.weights.paths
            plan, size = plan_of(files), path.stat().st_size
            [shard] = plan.shards
            found = loaded_bytes(files, plan)
            reads, loads, busy = [], [], []
            for _ in range(options.rounds):
                reads.append(timed(path, partial(plain_read, path))[0])
                load_s, busy_s = timed(path, partial(loaded_bytes, files, plan))
                loads.append(load_s)
                busy.append(busy_s)
            ratios = [read / load for read, load in zip(reads, loads, strict=True)]
            rates = (f"{size / median(each) / 1e9:.2f} GB/s" for each in (reads, loads))
            sizes = (f"{each / 1e9:.4f} GB" for each in (size, plan.device_bytes(shard), found))
            cells = (*sizes, *rates, f"{median(busy):.1f} s", f"{median(ratios):.0%}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
