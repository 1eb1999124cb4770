"""A quarter of an hour of mixed load on a server of its own: does it grow?

    python -m tests.acceptance.soak [--minutes 15] [--clients 8]

Each minute prints memory, the prefixes' part of it and where it is (the C library's main heap, its
arenas of threads, mappings of their own, files), descriptors and threads; at the end ranges and
slopes over the last two thirds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tests.acceptance.hostile.server import CHAT, MIB, Server, chat, posted_head

WORDS = (
    "os path json dict list async queue read write open close thread lock event "
    "what does how do I use module function argument returns raise error file"
).split()
SAMPLE_S = 1.0
REGION_BYTES = 64 << 20  # of the C library for threads: each begins at a multiple of it
MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+(.*)")
TURNS = 4


class Load:
    """Clients that go on until `ended`; counts how each request ended."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.ended = threading.Event()
        self.counts: Counter[str] = Counter()

    def run(self, number: int) -> None:
        """One client: acts of all kinds, in an order of its own."""
        draw = random.Random(number)
        acts: tuple[Callable[[random.Random], str], ...] = (
            self.talk,
            self.talk,
            self.leave,
            self.cancel,
            self.long_prompt,
            self.keep,
            self.err,
            self.metrics,
        )
        while not self.ended.is_set():
            act = draw.choice(acts)
            try:
                self.counts[f"{act.__name__}: {act(draw)}"] += 1
            except (OSError, http.client.HTTPException) as error:
                self.counts[f"{act.__name__}: {type(error).__name__}"] += 1

    def talk(self, draw: random.Random) -> str:
        """A chat of several turns."""
        messages: list[dict[str, str]] = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": text(draw, 20)})
            body = json.dumps({"messages": messages, "max_tokens": draw.randint(4, 40)})
            status, said = self._server.post(body.encode())
            if status != 200:
                return str(status)
            answer = json.loads(said)["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": answer or ""})
        return "200"

    def leave(self, draw: random.Random) -> str:
        """A stream that the client leaves in the middle, by a close or a reset."""
        body = chat(text(draw, 20), stream=True, ignore_eos=True, n=draw.choice((1, 4)))
        with self._server.connect() as client:
            client.sendall(posted_head(len(body)) + body)
            client.recv(draw.randint(100, 2000))
            if draw.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return "left"

    def cancel(self, draw: random.Random) -> str:
        """A long prompt whose client leaves during prefill."""
        body = chat(text(draw, 2000), stream=True)
        with self._server.connect() as client:
            client.sendall(posted_head(len(body)) + body)
            time.sleep(draw.random() * 0.3)
        return "left"

    def long_prompt(self, draw: random.Random) -> str:
        return str(self._server.post(chat(text(draw, draw.randint(500, 1500)), max_tokens=4))[0])

    def keep(self, draw: random.Random) -> str:
        """One of a few shared prompts, kept on disk."""
        shared = text(random.Random(draw.randrange(20)), 600)
        body = {"messages": [{"role": "system", "content": shared}], "max_tokens": 0}
        return str(self._server.post(json.dumps({**body, "keep_prefix": True}).encode())[0])

    def err(self, draw: random.Random) -> str:
        """A request that is refused."""
        body = chat(text(draw, 50_000)) if draw.random() < 0.3 else chat("Hi", temperature=3)
        return str(self._server.post(body)[0])

    def metrics(self, draw: random.Random) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        connection.request("GET", draw.choice(("/metrics", "/health", "/v1/models", CHAT)))
        status = connection.getresponse().status
        connection.close()
        return str(status)


def text(draw: random.Random, num_words: int) -> str:
    """Random words, so that prompts share only what they are meant to."""
    return " ".join(draw.choices(WORDS, k=num_words))


def slope_per_minute(samples: list[tuple[float, float]]) -> float:
    """Least-squares slope of (minute, value) pairs."""
    minutes, values = zip(*samples, strict=True)
    return statistics.linear_regression(minutes, values).slope


def nodes_mib(server: Server) -> float:
    """MiB of prefixes in memory, up to their budget."""
    found = re.search(rb'prefix_cache_bytes\{tier="memory"\} (\S+)', server.get("/metrics"))
    return float(found[1]) / MIB if found else float("nan")


@dataclass(frozen=True, slots=True)
class Resident:
    """Where a process's memory is, in MiB, which hints at what grows.

    Free pages between small blocks are in `heap` and `regions`; prefixes and tensors of a MiB or
    more are in `apart`.
    """

    heap: float
    regions: float
    apart: float
    files: float

    @staticmethod
    def of(pid: int) -> Resident:
        """Read /proc/PID/smaps."""
        kinds = Counter[str]()
        kind = ""
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if mapped := MAPPED.match(line):
                kind = _kind_of(int(mapped[1], 16), int(mapped[2], 16), mapped[3].strip())
            elif line.startswith("Rss:"):
                kinds[kind] += int(line.split()[1])
        return Resident(*(kinds[name] / 1024 for name in ("heap", "regions", "apart", "files")))


def _kind_of(begin: int, end: int, name: str) -> str:
    if name:
        return "heap" if name == "[heap]" else "files"
    return "regions" if begin % REGION_BYTES == 0 and end - begin <= REGION_BYTES else "apart"


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of the server, `minute` minutes after the load began."""

    minute: float
    memory: float
    descriptors: int
    threads: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        flags = (
            "--kv-cache-dir",
            directory,
            "--kv-cache-budget",
            "256M",
            "--prefix-cache-memory",
            "256M",
            "--log-level",
            "warning",
        )
        server = Server(flags=flags)
        try:
            soak(server, arguments.minutes, arguments.clients)
        finally:
            server.process.kill()
            server.process.wait()


def tell_growth(
    late: Sequence[Sample], parts: Sequence[tuple[float, float, Resident]], from_minute: float
) -> None:
    """Print ranges since then, and how fast each part of the memory grew."""
    for name in ("memory", "descriptors", "threads"):
        values = [float(getattr(each, name)) for each in late]
        middle = statistics.median(values)
        print(f"{name}: {min(values):.0f} to {max(values):.0f}, median {middle:.0f}")
    slopes = {"memory": slope_per_minute([(each.minute, each.memory) for each in late])}
    last = [each for each in parts if each[0] >= from_minute]
    if len(last) > 1:
        slopes["of nodes"] = slope_per_minute([(minute, nodes) for minute, nodes, _ in last])
        for name in (each.name for each in fields(Resident)):
            values_of = [(minute, getattr(at, name)) for minute, _, at in last]
            slopes[name] = slope_per_minute(values_of)
    told = ", ".join(f"{name} {slope:+.2f}" for name, slope in slopes.items())
    print(f"slopes from minute {from_minute:.0f} on, MiB a minute: {told}")


def soak(server: Server, minutes: float, num_clients: int) -> None:
    """Load the server for `minutes`, and print its resources."""
    server.warm()
    load = Load(server)
    threads = [threading.Thread(target=load.run, args=[i]) for i in range(num_clients)]
    for thread in threads:
        thread.start()
    begin, samples = time.monotonic(), list[Sample]()
    parts = list[tuple[float, float, Resident]]()  # each minute: when, of prefixes, where
    head = "minute     MiB  of nodes    heap  regions   apart   files  descriptors  threads    acts"
    print(head, flush=True)
    while (minute := (time.monotonic() - begin) / 60) < minutes:
        now = Sample(minute, server.memory_mib, server.num_descriptors, server.num_threads)
        samples.append(now)
        if minute >= len(parts) + 1:
            parts.append((minute, nodes_mib(server), Resident.of(server.process.pid)))
            _, nodes, at = parts[-1]
            print(
                f"{minute:6.0f}{now.memory:8.0f}{nodes:10.0f}{at.heap:8.0f}{at.regions:9.0f}"
                f"{at.apart:8.0f}{at.files:8.0f}{now.descriptors:13}{now.threads:9}"
                f"{load.counts.total():8}",
                flush=True,
            )
        time.sleep(SAMPLE_S)
    load.ended.set()
    for thread in threads:
        thread.join()
    tell_growth([each for each in samples if each.minute >= minutes / 3], parts, minutes / 3)
    time.sleep(3.0)
    print(
        f"at rest: {server.memory_mib:.0f} MiB, {server.num_descriptors} descriptors, "
        f"{server.num_threads} threads"
    )
    server.post(b" " * (5 << 20))  # after a large body freed memory is given back to the system
    time.sleep(3.0)
    print(f"after freed memory was given back: {server.memory_mib:.0f} MiB")
    for what, num in sorted(load.counts.items()):
        print(f"  {num:6} x {what}")
    for line in server.told[:20]:
        print(f"told: {line.decode(errors='replace').rstrip()}")


if __name__ == "__main__":
    main()
