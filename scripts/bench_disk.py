"""What it costs to read nodes from the page cache, checked, and to write them, beside plain calls.

    python scripts/bench_disk.py [--nodes 16] [--rounds 5] [--directory DIR]

Prints a markdown table of medians over interleaved rounds; a node is 2048 tokens of a 27B model.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

from luceasync.nodefiles.codec import MAX_HEADER_BYTES, checksum, encode_header
from luceasync.nodefiles.disk import NUM_READERS, DiskTier
from luceasync.nodefiles.layout import TensorEntry, file_order
from luceasync.nodefiles.metadata import NodeMetadata
from luceasync.nodefiles.outcomes import WriteOutcome
from luceasync.nodefiles.reader import NodeFile

NAMESPACE = "bench"
NUM_TOKENS = 2048
LAYERS = range(3, 64, 4)
ROW_SHAPE = (4, 256)  # [kv_heads, head_dim], bf16

Run = Callable[[], Awaitable[object]]


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


def node(key: str, tensors: dict[str, bytes]) -> tuple[bytes, list[bytes]]:
    """(header, buffers) of a node."""
    entries = file_order(
        TensorEntry("tokens", "I32", (NUM_TOKENS,), checksum(content))
        if name == "tokens"
        else TensorEntry(name, "BF16", (NUM_TOKENS, *ROW_SHAPE), checksum(content))
        for name, content in tensors.items()
    )
    metadata = NodeMetadata(NAMESPACE, key, "", 0, NUM_TOKENS, (0,), 0, False, False)
    return encode_header(entries, metadata), [tensors[entry.name] for entry in entries]


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


def reads(tier: DiskTier, keys: list[str], give: Callable[[int], memoryview]) -> dict[str, Run]:
    """Ways to read all nodes into the same memory, the plain one first."""
    paths = [tier._directory.path(key) for key in keys]
    pool = ThreadPoolExecutor(NUM_READERS)

    async def plain() -> object:
        return [plain_read(path, give) for path in paths]

    async def plain_threads() -> object:
        return list(pool.map(lambda path: plain_read(path, give), paths))

    async def one_by_one() -> object:
        found = [await tier.read(key) for key in keys]
        assert all(isinstance(each, NodeFile) for each in found), found
        return found

    async def together() -> object:
        found = await asyncio.gather(*map(tier.read, keys))
        assert all(isinstance(each, NodeFile) for each in found), found
        return found

    return {
        "readinto, one thread": plain,
        f"readinto, {NUM_READERS} threads": plain_threads,
        "DiskTier.read, one by one": one_by_one,
        "DiskTier.read, all at once": together,
    }


def writes(tier: DiskTier, tensors: dict[str, bytes]) -> dict[str, Run]:
    """Ways to write one node, the plain one first."""
    header, buffers = node("0" * 8, tensors)
    path = tier._directory.path("0" * 8).with_name("plain")

    async def plain() -> object:
        return plain_write(path, [header, *buffers])

    async def whole() -> object:
        result = await tier.write("0" * 8, header, buffers)
        assert result.outcome is WriteOutcome.WRITTEN, result
        return result

    return {"write and fsync": plain, "DiskTier.write": whole}


async def table(title: str, runs: dict[str, Run], num_bytes: int, num_rounds: int) -> None:
    """Print the rates of the runs and their part of the first one's. The first round is not
    counted.
    """
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            await run()
            spent[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values[1:]) for name, values in spent.items()}
    first = next(iter(medians.values()))
    print(f"\n| {title} | GB/s | ms | of the first |\n|---|---|---|---|")
    for name, seconds in medians.items():
        rate = num_bytes / seconds / 1e9
        print(f"| {name} | {rate:.1f} | {seconds * 1e3:.0f} | {first / seconds:.0%} |", flush=True)


async def measure(root: Path, num_nodes: int, num_rounds: int) -> None:
    """Write the nodes, then read and write them in each way."""
    tensors = contents()
    keys = [f"{number:08x}" for number in range(1, num_nodes + 1)]
    size = sum(map(len, tensors.values())) + MAX_HEADER_BYTES
    arena = Arena(size, num_nodes)
    async with DiskTier(root, NAMESPACE, frozenset(), allocate=arena.allocate) as tier:
        results = [await tier.write(key, *node(key, tensors)) for key in keys]
        assert {result.outcome for result in results} == {WriteOutcome.WRITTEN}, results
        size = results[0].num_bytes
        title = f"{num_nodes} nodes of {size / 1e6:.0f} MB, read"
        await table(title, reads(tier, keys, arena.allocate), num_nodes * size, num_rounds)
        await table("one of them, written", writes(tier, tensors), size, num_rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        asyncio.run(measure(Path(root), options.nodes, options.rounds))


if __name__ == "__main__":
    main()
