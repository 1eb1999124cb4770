"""The first token of a process that has just begun, beside reads of the same files in processes
that have just begun, into memory that they have touched before and into memory that is new. CPU.

    OMP_NUM_THREADS=1 python scripts/bench_new_process.py [--tokens 32768]

The files are in the page cache. Prints a markdown table of medians; see bench_restart.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_cache import SHAPES, build
from bench_restart import SENTENCE, decode_step, first_token, life, prepare, read

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.cyext.flatten import fill
from luceasync.text.tokenizer import Tokenizer

NUM_RUNS = 5
DEADLINE_S = 300.0


def main() -> None:
    """Measure and print; with --part do one part, as a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--part", nargs=3, metavar=("WHAT", "SHAPE", "ROOT"), help="internal")
    options = parser.parse_args()
    if options.part:
        what, shape, root = options.part
        print(json.dumps(part(what, shape, Path(root), options.tokens)))
        return
    print("| shape | first token | touched: read + copy + step | ratio | new: the same | ratio |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as root:
            report(shape, root, options.tokens)


def report(shape: str, root: str, num_tokens: int) -> None:
    """A row: the parts in turns, each in a new process."""
    in_new_process("keep", shape, root, num_tokens)
    rows = []
    for _ in range(NUM_RUNS):
        ours_s, step_s = in_new_process("ours", shape, root, num_tokens)
        [touched_s] = in_new_process("touched", shape, root, num_tokens)
        [new_s] = in_new_process("new", shape, root, num_tokens)
        rows.append((ours_s, touched_s + step_s, new_s + step_s))
    ours, *limits = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
    cells = " | ".join(f"{limit:.0f} ms | {ours / limit:.2f}" for limit in limits)
    print(f"| {shape} | {ours:.0f} ms | {cells} |", flush=True)


def in_new_process(what: str, shape: str, root: str, num_tokens: int) -> list[float]:
    """What the part says, in seconds."""
    command = [sys.executable, __file__, "--tokens", str(num_tokens), "--part", what, shape, root]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def part(what: str, shape: str, root: Path, num_tokens: int) -> list[float]:
    """Keep a prompt; or take it up, and a decode step; or read its files."""
    files = sorted(root.glob("bench/*.safetensors"))
    if what in ("touched", "new"):
        return [plain(files, is_touched=what == "touched")]
    return asyncio.run(ask(what, shape, root, files, num_tokens))


async def ask(what: str, shape: str, root: Path, files: list[Path], num_tokens: int) -> list[float]:
    """The first request of an engine that has just started; then a decode step."""
    machine = build(SHAPES[shape], num_tokens, root)
    encode = Tokenizer.load(BUNDLED_MODEL_DIR).encode
    text = SENTENCE * int((num_tokens - 64) * 64 / len(encode(SENTENCE * 64)))
    async with life(machine) as engine:
        prepare(files, "page cache")
        seconds, finish = await first_token(engine, text, 1 if what == "keep" else 2)
    if what == "keep":
        return [seconds]
    assert finish.usage.cached_tokens > finish.usage.prompt_tokens - 8, finish
    return [seconds, decode_step(machine, finish.usage.prompt_tokens)]


def plain(files: list[Path], *, is_touched: bool) -> float:
    """Seconds to read the files one after the other, and then copy their bytes once."""
    sizes = [file.stat().st_size for file in files]
    hosts, targets = ([torch.empty(n, dtype=torch.uint8) for n in sizes] for _ in range(2))
    for tensor in [*hosts, *targets] if is_touched else ():
        tensor.fill_(1)
    prepare(files, "page cache")
    started = time.perf_counter()
    for file, host in zip(files, hosts, strict=True):
        read(file, host)
    for target, host in zip(targets, hosts, strict=True):
        fill(target.numpy(), [0], [host.numpy()])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
