"""The first token of a process that has just begun, beside reads of the same files in processes
that have just begun, into memory that they have touched before and into memory that is new. CPU.

    OMP_NUM_THREADS=1 python scripts/bench_new_process.py [--tokens 32768]

The files are in the page cache. Prints a markdown table of medians; see bench_restart.py.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from luceasync.bench import command
from luceasync.bench.figures import median
from luceasync.bench.lives import NAMESPACE, ask, life, make_machine, text_of, user
from luceasync.bench.model import Decoding
from luceasync.bench.reading import fill_from, prepare
from luceasync.bench.report import Table, figure, ms
from luceasync.bench.rounds import interleave, measure
from luceasync.bench.small import SMALL
from luceasync.cyext.flatten import fill
from luceasync.disk_cache.names import parse_file_name

NUM_STEPS = 20
DEADLINE_S = 300.0


def main() -> None:
    """Measure and print; with --part do one part, as a process of its own."""
    parser = command.parser(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--part", nargs=3, metavar=("WHAT", "SHAPE", "ROOT"), help="internal")
    options = parser.parse_args()
    if options.part:
        what, shape, root = options.part
        print(json.dumps(part(what, shape, Path(root), options.tokens)))
        return
    limits = ("touched: read + copy + step", "ratio", "new: the same", "its ratio")
    table = command.begin(options).table(("shape", "first token", *limits))
    for shape in SMALL:
        with tempfile.TemporaryDirectory() as root:
            compare(table, shape, root, options.tokens, options.rounds)


def compare(table: Table, shape: str, root: str, num_tokens: int, num_rounds: int) -> None:
    """A row: the parts in turns, each in a new process."""

    def run(what: str) -> Callable[[], list[float]]:
        return lambda: in_new_process(what, shape, root, num_tokens)

    run("keep")()
    runs = {what: run(what) for what in ("ours", "touched", "new")}
    samples = interleave(runs, num_rounds, num_warmups=0)
    steps_s = [step_s for _, step_s in samples["ours"]]
    ours_s = median([first_s for first_s, _ in samples["ours"]])
    cells = [ms(ours_s, 0)]
    for what in ("touched", "new"):
        pairs = zip(samples[what], steps_s, strict=True)
        limit_s = median([seconds + step_s for [seconds], step_s in pairs])
        cells += [ms(limit_s, 0), figure(ours_s / limit_s)]
    table.add(shape, *cells)


def in_new_process(what: str, shape: str, root: str, num_tokens: int) -> list[float]:
    """What the part says, in seconds."""
    command = [sys.executable, __file__, "--tokens", str(num_tokens), "--part", what, shape, root]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def part(what: str, shape: str, root: Path, num_tokens: int) -> list[float]:
    """Keep a prompt; or take it up, and a decode step; or read its files."""
    found = sorted(root.glob(f"{NAMESPACE}/*"))
    files = [path for path in found if parse_file_name(path.name) is not None]
    if what in ("touched", "new"):
        return [plain(files, is_touched=what == "touched")]
    return asyncio.run(first(what, shape, root, files, num_tokens))


async def first(
    what: str, shape: str, root: Path, files: list[Path], num_tokens: int
) -> list[float]:
    """The first request of an engine that has just started; then a decode step."""
    machine = make_machine(SMALL[shape], "cpu:0", num_tokens + 2048, root, dtype="fp32", parallel=1)
    text = text_of(num_tokens - 64)
    async with life(machine) as engine:
        prepare(files, "page cache")
        asked = await ask(engine, user(text), 1 if what == "keep" else 2)
    if what == "keep":
        return [asked.first_s]
    usage = asked.finish.usage
    assert usage.cached_tokens > usage.prompt_tokens - 8, asked.finish
    step = Decoding(machine.backend, 1, usage.prompt_tokens)
    return [asked.first_s, median(measure({"": step}, NUM_STEPS, num_warmups=0)[""])]


def plain(files: list[Path], *, is_touched: bool) -> float:
    """Seconds to read the files one after the other, and then copy their bytes once."""
    sizes = [file.stat().st_size for file in files]
    hosts, targets = ([torch.empty(n, dtype=torch.uint8) for n in sizes] for _ in range(2))
    for tensor in [*hosts, *targets] if is_touched else ():
        tensor.fill_(1)
    prepare(files, "page cache")
    started = time.perf_counter()
    for file, host in zip(files, hosts, strict=True):
        fill_from(file, host)
    for target, host in zip(targets, hosts, strict=True):
        fill(target.numpy(), [0], [host.numpy()])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
