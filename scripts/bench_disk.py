"""What it costs to read nodes from the page cache, checked, and to write them, beside plain calls.

    python scripts/bench_disk.py [--nodes 16] [--rounds 5] [--directory DIR]

Prints a markdown table of medians over interleaved rounds; a node is 2048 tokens of a 27B model.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

from luceasync.bench import command
from luceasync.bench.report import Report, Run, figure, measure, medians, ms, share
from luceasync.disk_cache.codec import (
    MAX_HEADER_BYTES,
    EncodedFile,
    TensorEntry,
    checksum,
    encode_file,
    file_order,
)
from luceasync.disk_cache.disk import NUM_READERS, DiskTier
from luceasync.disk_cache.metadata import NodeMetadata
from luceasync.disk_cache.outcomes import WriteOutcome
from luceasync.disk_cache.reader import NodeFile

NAMESPACE = "bench"
NUM_TOKENS = 2048
LAYERS = range(3, 64, 4)
END_KINDS: frozenset[str] = frozenset()  # these nodes have no end
ROW_SHAPE = (4, 256)  # [kv_heads, head_dim], bf16


class Arena:
    """Memory that is given out again and again, in a ring: what a server has that keeps its own."""

    def __init__(self, num_bytes: int, num_places: int) -> None:
        self._places = [memoryview(bytearray(num_bytes)) for _ in range(num_places)]
        self._numbers = itertools.count()  # threads may ask at once

    def allocate(self, num_bytes: int) -> memoryview:
        return self._places[next(self._numbers) % len(self._places)][:num_bytes]


def contents() -> dict[str, bytes]:
    """The tensors of one node, random."""
    names = [f"ls0_attn_{kind}.{layer}" for layer in LAYERS for kind in "kv"]
    rows = NUM_TOKENS * ROW_SHAPE[0] * ROW_SHAPE[1] * 2
    return {"tokens": os.urandom(4 * NUM_TOKENS)} | {name: os.urandom(rows) for name in names}


def node(key: str, tensors: dict[str, bytes]) -> EncodedFile:
    """The file of a node."""
    entries = [
        TensorEntry("tokens", "I32", (NUM_TOKENS,), checksum(content))
        if name == "tokens"
        else TensorEntry(name, "BF16", (NUM_TOKENS, *ROW_SHAPE), checksum(content))
        for name, content in tensors.items()
    ]
    ordered = file_order(entries, END_KINDS)
    metadata = NodeMetadata(NAMESPACE, key, "", 0, NUM_TOKENS, (0,), 0, False, False)
    return encode_file(ordered, tensors, metadata)


def plain_read(path: Path, give: Callable[[int], memoryview]) -> memoryview:
    """The file's bytes, unchecked."""
    with FileIO(path) as raw:
        view = give(path.stat().st_size)
        filled = 0
        while filled < len(view):
            filled += raw.readinto(view[filled:]) or 0
    return view


def plain_write(path: Path, buffers: list[bytes]) -> None:
    """Written and synced; no other name, no other check."""
    with FileIO(path, "wb") as raw:
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                view = view[raw.write(view) :]
        os.fsync(raw)


class Nodes:
    """A directory of nodes, and what is done with them; `runner` has the tier's event loop."""

    def __init__(self, root: Path, tier: DiskTier, runner: asyncio.Runner) -> None:
        self._tier = tier
        self._runner = runner
        self._folder = root / NAMESPACE

    def path(self, key: str) -> Path:
        """Where a node lies."""
        return self._folder / f"{key}.safetensors"

    def write(self, file: EncodedFile) -> int:
        """Bytes of the file."""
        result = self._runner.run(self._tier.write(file))
        assert result.outcome is WriteOutcome.WRITTEN, result
        return result.num_bytes

    def read(self, keys: list[str], *, at_once: bool) -> list[Any]:
        """All of the nodes, checked."""
        found = self._runner.run(self._together(keys) if at_once else self._in_turn(keys))
        assert all(isinstance(each, NodeFile) for each in found), found
        return found

    async def _together(self, keys: list[str]) -> list[Any]:
        return await asyncio.gather(*map(self._tier.read, keys))

    async def _in_turn(self, keys: list[str]) -> list[Any]:
        return [await self._tier.read(key) for key in keys]


def reads(nodes: Nodes, keys: list[str], give: Callable[[int], memoryview]) -> dict[str, Run]:
    """Ways to read all nodes into the same memory, the plain one first."""
    paths = [nodes.path(key) for key in keys]
    pool = ThreadPoolExecutor(NUM_READERS)

    def plain(path: Path) -> memoryview:
        return plain_read(path, give)

    return {
        "readinto, one thread": lambda: [plain(path) for path in paths],
        f"readinto, {NUM_READERS} threads": lambda: list(pool.map(plain, paths)),
        "DiskTier.read, one by one": lambda: nodes.read(keys, at_once=False),
        "DiskTier.read, all at once": lambda: nodes.read(keys, at_once=True),
    }


def writes(nodes: Nodes, tensors: dict[str, bytes]) -> dict[str, Run]:
    """Ways to write one node, the plain one first."""
    file = node("0" * 8, tensors)
    path = nodes.path("0" * 8).with_name("plain")
    return {
        "write and fsync": lambda: plain_write(path, [file.header, *file.buffers]),
        "DiskTier.write": lambda: nodes.write(file),
    }


def show(report: Report, title: str, runs: dict[str, Run], num_bytes: int, rounds: int) -> None:
    """The rates of the runs and their part of the first one's."""
    seconds = medians(measure(runs, rounds))
    first = next(iter(seconds.values()))
    table = report.table(("what", "GB/s", "time", "of the first"), title)
    for name, spent in seconds.items():
        rate = figure(num_bytes / spent / 1e9, digits=1)
        table.add(name, rate, ms(spent, 0), share(first / spent))


def compare(report: Report, root: Path, num_nodes: int, num_rounds: int) -> None:
    """Write the nodes, then read and write them in each way."""
    tensors = contents()
    keys = [f"{number:08x}" for number in range(1, num_nodes + 1)]
    arena = Arena(sum(map(len, tensors.values())) + MAX_HEADER_BYTES, num_nodes)
    with asyncio.Runner() as runner:
        tier = DiskTier(root, NAMESPACE, END_KINDS, allocate=arena.allocate)
        runner.run(tier.__aenter__())
        nodes = Nodes(root, tier, runner)
        size = max(nodes.write(node(key, tensors)) for key in keys)
        title = f"{num_nodes} nodes of {size / 1e6:.0f} MB, read"
        runs = reads(nodes, keys, arena.allocate)
        show(report, title, runs, num_nodes * size, num_rounds)
        show(report, "one of them, written", writes(nodes, tensors), size, num_rounds)
        runner.run(tier.__aexit__(None, None, None))


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=5)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        compare(command.begin(options), Path(root), options.nodes, options.rounds)


if __name__ == "__main__":
    main()
