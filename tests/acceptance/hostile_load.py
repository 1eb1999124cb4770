"""Many hostile clients at once at a server of its own; they run in a process of their own, niced.

python -m tests.acceptance.hostile_load connections [--seconds 60] [--per-second 1000]
python -m tests.acceptance.hostile_load crowd [--seconds 60] [--clients 100]
python -m tests.acceptance.hostile_load grammars [--requests 200] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tests.acceptance.hostile.server import CHAT, ROOT, SAID, Server, chat, watched

DRIVER_NICE = 10
REST_S = 5.0
# Clients that mean well, by their addresses: beside many others each of them has one lane at times,
# and where it has two streams they take turns on it.
OTHERS = {"one stream": ("127.0.9.1",), "two of one client": ("127.0.9.2", "127.0.9.2")}
NUM_LANES = 4
Sample = tuple[float, int, int]


def driven(
    server: Server, module: str, *arguments: object
) -> tuple[dict[str, object], list[Sample]]:
    """The driver's output, and memory, descriptors and threads of the server meanwhile."""
    command = ["nice", "-n", str(DRIVER_NICE), sys.executable]
    command += ["-m", f"tests.acceptance.hostile.{module}"]
    process = subprocess.Popen(
        [*command, str(server.port), *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    samples: list[Sample] = []
    while process.poll() is None:
        samples.append((server.memory_mib, server.num_descriptors, server.num_threads))
        time.sleep(0.2)
    assert process.stdout is not None
    return json.loads(process.stdout.read()), samples


def told(name: str, values: list[float]) -> None:
    print(f"{name}: {min(values):.0f} to {max(values):.0f}, last {values[-1]:.0f}")


def connections(server: Server, arguments: argparse.Namespace) -> None:
    """Open and end connections at a rate, for a while."""
    before = server.num_descriptors
    with watched(server) as seen:
        said, samples = driven(server, "connections", arguments.per_second, arguments.seconds)
    print(json.dumps(said, indent=1))
    told("descriptors", [sample[1] for sample in samples])
    told("memory, MiB", [sample[0] for sample in samples])
    time.sleep(REST_S)
    print(f"descriptors before and after: {before}, {server.num_descriptors}")
    print(f"slowest /health: {seen[0]:.3f} s")


class Streams:
    """A well-behaved client per address: each asks for one stream after the other."""

    def __init__(self, server: Server, addresses: Sequence[str]) -> None:
        self._server = server
        self.counts: Counter[str] = Counter()
        self.longest_gap_s = 0.0
        self.ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[a]) for a in addresses]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, address: str) -> None:
        while not self.ended.is_set():
            try:
                self.counts[self._stream(address)] += 1
            except OSError as error:
                self.counts[type(error).__name__] += 1
            if self.counts.total() > self.counts["whole"] * 2:
                time.sleep(1.0)  # as Retry-After says

    def _stream(self, address: str) -> str:
        connection = self._server.speak(address)
        body = chat("What does os.getcwd do?", stream=True, ignore_eos=True, max_tokens=1000)
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return str(response.status)
        line, then, begun = b"", time.perf_counter(), False
        while read := response.readline():
            if read.startswith(b"data: "):
                now = time.perf_counter()
                if begun:  # before its first token it waits for a lane
                    self.longest_gap_s = max(self.longest_gap_s, now - then)
                begun, then, line = True, now, read
        return "whole" if line == b"data: [DONE]\n" else "broken off"


def crowd(server: Server, arguments: argparse.Namespace) -> None:
    """Clients of all hostile kinds at once."""
    fill(server)
    time.sleep(REST_S)
    before = server.memory_mib
    streams = {name: Streams(server, addresses) for name, addresses in OTHERS.items()}
    with watched(server) as seen, ExitStack() as ending:
        for one in streams.values():
            ending.enter_context(one)
        time.sleep(2.0)
        said, samples = driven(server, "crowd", arguments.clients, arguments.seconds)
        for one in streams.values():  # before the first of them is waited for
            one.ended.set()
    print(json.dumps(said, indent=1))
    status = server.post(f'{{{SAID},"max_tokens":1}}'.encode())[0]
    time.sleep(REST_S)
    after = server.memory_mib
    for name, one in streams.items():
        print(f"others, {name}: {dict(one.counts)}, longest gap {one.longest_gap_s:.2f} s")
    print(f"the next request: {status}")
    told("descriptors", [sample[1] for sample in samples])
    print(
        f"memory before, most, after: {before:.0f}, {seen[1]:.0f}, {after:.0f} MiB "
        f"({after / before - 1:+.1%})"
    )
    print(f"slowest /health: {seen[0]:.3f} s")


def grammars(server: Server, arguments: argparse.Namespace) -> None:
    """Odd schemas, expressions and grammars, one after the other, beside a stream."""
    fill(server)
    time.sleep(REST_S)
    before = server.memory_mib
    stream = Streams(server, OTHERS["one stream"])
    with watched(server) as seen, stream:
        time.sleep(REST_S)
        alone_s, stream.longest_gap_s = stream.longest_gap_s, 0.0
        said, samples = driven(server, "grammars", arguments.requests, arguments.seed)
    print(json.dumps(said, indent=1))
    time.sleep(REST_S)
    print(f"the stream: {dict(stream.counts)}")
    print(f"its longest gap: alone {alone_s:.3f} s, beside them {stream.longest_gap_s:.3f} s")
    told("descriptors", [sample[1] for sample in samples])
    print(f"memory before, most, after: {before:.0f}, {seen[1]:.0f}, {server.memory_mib:.0f} MiB")
    print(f"slowest /health: {seen[0]:.3f} s")


def fill(server: Server) -> None:
    """Ask long prompts side by side, so that every lane has been used to its end."""
    body = chat("read the file and close it " * 400, max_tokens=4)
    threads = [threading.Thread(target=server.post, args=[body]) for _ in range(NUM_LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    loads: dict[str, Callable[[Server, argparse.Namespace], None]] = {
        "connections": connections,
        "crowd": crowd,
        "grammars": grammars,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load", choices=loads)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--per-second", type=float, default=1000.0)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", default="0", help="for prefixes; what is kept counts as growth")
    arguments = parser.parse_args()
    server = Server(flags=["--prefix-cache-memory", arguments.memory, "--log-level", "warning"])
    try:
        server.warm()
        with watched(server) as seen:
            time.sleep(REST_S)
        print(f"slowest /health before: {seen[0]:.3f} s")
        loads[arguments.load](server, arguments)
        for line in server.told[:20]:
            print(f"told: {line.decode(errors='replace').rstrip()}")
    finally:
        server.process.kill()
        server.process.wait()


if __name__ == "__main__":
    main()
