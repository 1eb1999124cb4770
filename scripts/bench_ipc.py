"""What a hop between two processes costs, beside a bare ping-pong of the same run.

    python scripts/bench_ipc.py [--rounds 5] [--hops 2000] [--chunks 40] [--transport shared]

A hop is an activation of four lanes of 5120 in bf16 there and back: copied in, read where it lies
as by a group, copied out. A bare ping-pong is 64 bytes over a socket. Each runs back to back,
every 5 ms, and so beside 16 streams of events. A chunk is 20 MiB, copied in and out.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from itertools import chain

from processes.echo import (
    CHUNK_BYTES,
    DEADLINE_S,
    Chunk,
    Done,
    bare_end,
    channel_end,
    hop_of,
    ping_of,
)
from processes.streams import streams

from luceasync.bench import command
from luceasync.bench.figures import median, paired_ratio, percentile
from luceasync.bench.report import Report, figure
from luceasync.bench.rounds import interleave
from luceasync.cyext.flatten import fill
from luceasync.ipc.launcher import LocalStarted
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.wiring import TRANSPORTS

APART_S = 5e-3


def latencies(act: Callable[[], None], count: int, apart_s: float) -> list[float]:
    """Seconds of each of `count` runs that begin at least `apart_s` apart."""
    found = []
    for _ in range(count):
        started = time.perf_counter()
        act()
        found.append(time.perf_counter() - started)
        if apart_s:
            time.sleep(max(0.0, apart_s - found[-1]))
    return found


def chunk_rate(started: LocalStarted, num_chunks: int) -> float:
    """Bytes a second of chunks that are written while earlier ones are read."""
    channel = started.channel
    source = bytearray(os.urandom(CHUNK_BYTES))
    numbers = []
    begun = time.perf_counter()
    for _ in range(num_chunks):
        room = channel.reserve(CHUNK_BYTES, DEADLINE_S)
        fill(room.view, [0], [source])
        numbers.append(channel.send(Chunk(), room, deadline_s=DEADLINE_S))
    for number in numbers:
        channel.answer(number, Done, DEADLINE_S)
    return num_chunks * CHUNK_BYTES / (time.perf_counter() - begun)


def copy_rate() -> float:
    """Bytes a second of one plain copy by one thread, the half of a chunk's way."""
    source, target = bytearray(os.urandom(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    begun = time.perf_counter()
    for _ in range(10):
        target[:] = source
    return 10 * CHUNK_BYTES / (time.perf_counter() - begun)


def half_rate(shared: memoryview, *, comes_in: bool) -> float:
    """Bytes a second of one half of a chunk's way, to shared memory or out of it, by one thread and
    past the caches: what the memory gives.
    """
    own = memoryview(bytearray(os.urandom(CHUNK_BYTES)))
    source, target = (shared, own) if comes_in else (own, shared)
    begun = time.perf_counter()
    for _ in range(10):
        fill(target, [0], [source])
    return 10 * CHUNK_BYTES / (time.perf_counter() - begun)


def us(seconds: float) -> float:
    return seconds * 1e6


def compare_hops(
    report: Report, started: LocalStarted, bare: socket.socket, options: argparse.Namespace
) -> None:
    """Hops and bare ping-pongs in turns, in each of the three ways."""
    table = report.table(
        ("when", "bare p50", "bare p99", "hop p50", "hop p99", "hop / bare, p50"), "a hop"
    )
    acts = {"bare": ping_of(bare), "hop": hop_of(started)}
    for when, apart_s, count, with_streams in (
        ("back to back", 0.0, options.hops, False),
        ("every 5 ms", APART_S, max(50, options.hops // 10), False),
        ("every 5 ms, 16 streams", APART_S, max(50, options.hops // 10), True),
    ):
        variants = {
            name: lambda act=act, count=count, apart_s=apart_s: latencies(act, count, apart_s)
            for name, act in acts.items()
        }
        if with_streams:
            with streams():
                found = interleave(variants, options.rounds)
        else:
            found = interleave(variants, options.rounds)
        merged = {name: list(chain.from_iterable(rounds)) for name, rounds in found.items()}
        halves = {name: [median(each) for each in rounds] for name, rounds in found.items()}
        cells = [
            figure(us(percentile(merged[name], percent)), "us", 0)
            for name in acts
            for percent in (50, 99)
        ]
        table.add(when, *cells, figure(paired_ratio(halves["hop"], halves["bare"])))


def compare_chunks(report: Report, started: LocalStarted, options: argparse.Namespace) -> None:
    """Chunks beside a plain copy."""
    memory = SealedMemory.create("bench", CHUNK_BYTES)
    variants: dict[str, Callable[[], float]] = {
        "one plain copy": copy_rate,
        "to shared memory": lambda: half_rate(memory.view, comes_in=False),
        "out of it": lambda: half_rate(memory.view, comes_in=True),
        "chunks": lambda: chunk_rate(started, options.chunks),
    }
    found = interleave(variants, options.rounds)
    memory.close()
    halves = zip(found["to shared memory"], found["out of it"], strict=True)
    limit = [min(pair) for pair in halves]  # both run at once, each on a core of its own
    table = report.table(("what", "GB/s", "of the slower half"), "chunks of 20 MiB, both copies")
    for name, rates in found.items():
        of_limit = paired_ratio(rates, limit)
        table.add(name, figure(median(rates) / 1e9, digits=1), figure(of_limit))


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=5)
    parser.add_argument("--hops", type=int, default=2000, help="of a round, back to back")
    parser.add_argument("--chunks", type=int, default=40, help="of a round")
    parser.add_argument("--transport", choices=TRANSPORTS, default="shared")
    options = parser.parse_args()
    report = command.begin(options)
    with bare_end() as bare, channel_end(options.transport) as started:
        compare_hops(report, started, bare, options)
        compare_chunks(report, started, options)


if __name__ == "__main__":
    main()
