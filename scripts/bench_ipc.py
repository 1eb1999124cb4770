"""What a hop between two processes costs, beside a bare ping-pong of the same run.

    python scripts/bench_ipc.py [--rounds 5] [--hops 2000] [--chunks 40] [--transport shared]

A hop is an activation of four lanes of 5120 in bf16 there and back: copied in, read where it lies
as by a group, copied out. A bare ping-pong is 64 bytes over a socket. Each runs back to back,
every 5 ms, and so beside 16 streams of events. A chunk is 20 MiB, copied in and out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from luceasync.bench import command
from luceasync.bench.figures import median, paired_ratio, percentile
from luceasync.bench.report import Report, figure
from luceasync.bench.rounds import interleave
from luceasync.cyext.flatten import fill
from luceasync.errors import ChannelClosed
from luceasync.ipc.handshake import Statement, be_greeted, greet
from luceasync.ipc.launcher import LocalLauncher, LocalStarted, Program
from luceasync.ipc.local import LocalChannel
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import Message
from luceasync.ipc.wiring import TRANSPORTS, come_home, open_rings

HOP_BYTES = 4 * 5120 * 2
CHUNK_BYTES = 20 << 20
BARE_BYTES = 64
RING_BYTES = (64 << 20, 64 << 20)
DEADLINE_S = 60.0
APART_S = 5e-3
NUM_STREAMS = 16
TOKEN_S = 10e-3  # between two events of a stream
CHILD = "--child"


class Hop(Message, frozen=True):
    """Take this activation and send one back."""


class Chunk(Message, frozen=True):
    """Take this; an answer without a payload is enough."""


class Done(Message, frozen=True):
    """The answer."""


def serve() -> None:
    """The other end: copies what comes, and answers."""
    home = come_home((Hop, Chunk))
    be_greeted(home.channel, Statement(), DEADLINE_S)
    with suppress(ChannelClosed):  # the measurement has ended
        answer_all(home.channel)
    home.close()


def answer_all(channel: LocalChannel[Any]) -> None:
    """Hops and chunks, until the other end is gone."""
    chunk = memoryview(bytearray(CHUNK_BYTES))
    while True:
        got = channel.receive(DEADLINE_S)
        assert got.payload is not None
        room = None
        if isinstance(got.message, Hop):
            room = channel.reserve(HOP_BYTES, DEADLINE_S)
            room.view[:] = got.payload.view(HOP_BYTES)
            got.payload.free()
        else:
            got.payload.into(chunk)
        channel.send(Done(), room, answers=got.number, deadline_s=DEADLINE_S)


def serve_bare(fd: int) -> None:
    """The other end of a bare ping-pong."""
    with socket.socket(fileno=fd) as sock:
        while packet := sock.recv(BARE_BYTES):
            sock.send(packet)


@contextmanager
def bare_end() -> Iterator[socket.socket]:
    """A socket to a process that sends back what comes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        arguments = [sys.executable, __file__, CHILD, str(theirs.fileno())]
        process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
        theirs.close()
        yield ours
        ours.close()
        process.wait(DEADLINE_S)


@contextmanager
def channel_end(transport: str) -> Iterator[LocalStarted]:
    """A process at the other end of a channel."""
    rings = open_rings(transport, RING_BYTES)
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    program = Program(
        Path(sys.executable), "echo", RING_BYTES, rings=rings, environment=environment
    )
    launcher = LocalLauncher(program, lambda line: print(line, file=sys.stderr))
    try:
        started = launcher.launch([__file__, CHILD, "channel"], (Done,))
        greet(started.channel, Statement(), DEADLINE_S)
        yield started
    finally:
        launcher.close()
        if rings is not None:
            rings.close()


@contextmanager
def streams() -> Iterator[None]:
    """A thread whose event loop writes events of NUM_STREAMS answers, as a server does."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_stream_all(stop)))
    thread.start()
    yield
    stop.set()
    thread.join()


async def _stream_all(stop: threading.Event) -> None:
    await asyncio.gather(*(_stream(stop) for _ in range(NUM_STREAMS)))


async def _stream(stop: threading.Event) -> None:
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    other_reader, other_writer = await asyncio.open_connection(sock=theirs)
    while not stop.is_set():
        choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
        event = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "choices": [choice]}
        writer.write(f"data: {json.dumps(event)}\n\n".encode())
        await writer.drain()
        await other_reader.read(1 << 16)
        await asyncio.sleep(TOKEN_S)
    for each in (writer, other_writer):
        each.close()
        await each.wait_closed()


def hop_of(started: LocalStarted) -> Callable[[], None]:
    """One hop, there and back."""
    channel = started.channel
    source, target = bytearray(os.urandom(HOP_BYTES)), memoryview(bytearray(HOP_BYTES))

    def hop() -> None:
        room = channel.reserve(HOP_BYTES, DEADLINE_S)
        room.view[:] = source
        got = channel.call(Hop(), Done, room, deadline_s=DEADLINE_S)
        assert got.payload is not None
        got.payload.into(target)

    return hop


def ping_of(sock: socket.socket) -> Callable[[], None]:
    """One bare ping-pong."""
    packet = bytes(BARE_BYTES)

    def ping() -> None:
        sock.send(packet)
        sock.recv(BARE_BYTES)

    return ping


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
    if sys.argv[1:2] == [CHILD]:
        return serve() if sys.argv[2] == "channel" else serve_bare(int(sys.argv[2]))
    parser = command.parser(__doc__, rounds=5)
    parser.add_argument("--hops", type=int, default=2000, help="of a round, back to back")
    parser.add_argument("--chunks", type=int, default=40, help="of a round")
    parser.add_argument("--transport", choices=TRANSPORTS, default="shared")
    options = parser.parse_args()
    report = command.begin(options)
    with bare_end() as bare, channel_end(options.transport) as started:
        compare_hops(report, started, bare, options)
        compare_chunks(report, started, options)
    return None


if __name__ == "__main__":
    main()
