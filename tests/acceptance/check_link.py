"""A store behind a link of little bandwidth: nodes are read where that is faster than running their
tokens, and only there. CPU, root, tc.

    python -m tests.acceptance.check_link --moto PYTHON [--factors 0.2,0.4,1,2.5,8]

The store is in a network namespace, behind a token bucket. Factors are of the rate at which reading
takes as long as running. Exit status 1 if a decision is wrong where they differ by more than two.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.store import S3Store

from luceasync.bench.servers import Client, server
from tests.acceptance import command
from tests.acceptance.check_store import BUCKET, prompt

HERE, THERE, PORT = "10.213.58.1", "10.213.58.2", 5000
DEADLINE_S = 120.0
NUM_PROMPTS = 3
UNCLEAR = 2.0  # a link so much faster or slower than prefill: either may win
LATE_S = 2.0
ENVIRONMENT = {
    "AWS_ENDPOINT_URL": f"http://{THERE}:{PORT}",
    "AWS_ALLOW_HTTP": "true",
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_REGION": "us-east-1",
}


class Link:
    """The way to another namespace, and how fast what comes from there may be."""

    def __init__(self, stack: ExitStack) -> None:
        self.namespace, here = f"store-{os.getpid()}", f"st{os.getpid()}"
        _run("ip", "netns", "add", self.namespace)
        stack.callback(_run, "ip", "netns", "del", self.namespace)
        _run("ip", "link", "add", here, "type", "veth", "peer", "box", "netns", self.namespace)
        _run("ip", "addr", "add", f"{HERE}/24", "dev", here)
        _run("ip", "link", "set", here, "up")
        _run("ip", "-n", self.namespace, "addr", "add", f"{THERE}/24", "dev", "box")
        _run("ip", "-n", self.namespace, "link", "set", "box", "up")

    @property
    def inside(self) -> list[str]:
        """Before a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace]

    def limit(self, bytes_per_s: float) -> None:
        """Let so much through."""
        bucket = ["rate", f"{int(8 * bytes_per_s)}bit", "burst", "256kb", "latency", "200ms"]
        _run(*self.inside, "tc", "qdisc", "replace", "dev", "box", "root", "tbf", *bucket)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def store_in(link: Link, python: str) -> Iterator[S3Store]:
    """An S3 server in the link's namespace, with an empty bucket."""
    code = f"from moto.server import main; main(['-H', '{THERE}', '-p', '{PORT}'])"
    words = [*link.inside, python, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + DEADLINE_S
            while True:
                with suppress(OSError), socket.create_connection((THERE, PORT), 1.0):
                    break
                assert time.monotonic() < deadline_s, "moto did not start"
                time.sleep(0.1)
            made = urllib.request.Request(f"http://{THERE}:{PORT}/{BUCKET}", method="PUT")
            urllib.request.urlopen(made, timeout=30).close()
            keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
            options = {"client_options": {"allow_http": True}}
            yield S3Store(BUCKET, endpoint=f"http://{THERE}:{PORT}", **keys, **options)
        finally:
            process.kill()


@dataclass(frozen=True)
class First:
    """The first token of an answer: when it came, and how much of the prompt was cached."""

    seconds: float
    num_prompt: int
    num_cached: int

    @property
    def is_read(self) -> bool:
        return self.num_cached >= 0.9 * self.num_prompt

    def __str__(self) -> str:
        return f"{'read' if self.is_read else 'run'}, {self.seconds:.2f} s"


def first_of(client: Client, number: int) -> First:
    """Ask for one token."""
    began_s = time.perf_counter()
    with closing(Client(client.url)) as fresh:
        body = {"messages": prompt(number), "temperature": 0, "max_tokens": 1}
        usage = fresh.post("/v1/chat/completions", body)["usage"]
    seconds = time.perf_counter() - began_s
    return First(seconds, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def num_unwritten(client: Client) -> int:
    """Nodes that the server is still to write."""
    with urllib.request.urlopen(f"{client.url}/metrics", timeout=DEADLINE_S) as answer:
        lines = answer.read().decode().splitlines()
    name = "luceasync_prefix_cache_unwritten_nodes "
    return next(int(float(line.split()[1])) for line in lines if line.startswith(name))


def written(client: Client) -> None:
    """Wait until all files are there: only what is there goes up when it is used again."""
    time.sleep(0.2)  # an answer is saved once it is told
    deadline_s = time.monotonic() + DEADLINE_S
    while num_unwritten(client):
        assert time.monotonic() < deadline_s, "nodes are not written"
        time.sleep(0.02)


@contextmanager
def server_at(folder: Path) -> Iterator[Client]:
    """A server with an empty directory before the store."""
    flags = ["--dtype", "fp32", "--parallel", "1", "--draft", "none"]
    flags += ["--kv-cache-dir", str(folder), "--kv-store", f"s3://{BUCKET}/shared"]
    with server(flags, env=ENVIRONMENT) as client:
        yield client


def fill(bucket: S3Store, folder: Path) -> int:
    """Put the prompts into the store; the bytes of the last one."""
    before = 0
    with server_at(folder) as client:
        for number in range(NUM_PROMPTS):
            for _ in range(2):  # the second use has it uploaded
                first_of(client, number)
                written(client)
            last, since_s = before, time.monotonic()
            deadline_s = since_s + DEADLINE_S
            while last == before or time.monotonic() - since_s < 2.0:
                assert time.monotonic() < deadline_s, "nothing was uploaded"
                held = sum(meta["size"] for page in obstore.list(bucket) for meta in page)
                if held != last:
                    last, since_s = held, time.monotonic()
                time.sleep(0.1)
            num_bytes, before = last - before, last
    return num_bytes


def factors(text: str) -> list[float]:
    """The type of --factors."""
    return [float(part) for part in text.split(",")]


def main() -> int:
    """Run all rates; the exit status."""
    parser = command.parser(__doc__)
    parser.add_argument("--moto", required=True, metavar="PYTHON")
    parser.add_argument("--factors", type=factors, default=[0.2, 0.4, 1, 2.5, 8])
    options = parser.parse_args()
    report, is_right = command.open_report(options), True
    columns = ("MB/s", "reading", "prefill", "first prompt", "second", "third", "right")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        link, folder = Link(stack), Path(name)
        bucket = stack.enter_context(store_in(link, options.moto))
        num_bytes = fill(bucket, folder / "a")
        table = report.table(columns, f"a prompt of {num_bytes / 1e6:.1f} MB in the store")
        prefill_s = 0.0
        for index, factor in enumerate(options.factors):
            with server_at(folder / f"b{index}") as client:
                first_of(client, 50)  # what is compiled on first use
                prefill_s = first_of(client, 100).seconds  # no server has it
                rate = factor * num_bytes / prefill_s
                link.limit(rate)
                found = [first_of(client, number) for number in range(NUM_PROMPTS)]
                link.limit(1e9)
            is_good = are_right(found, num_bytes / rate, prefill_s)
            is_right &= is_good
            read = f"{num_bytes / rate:.2f} s", f"{prefill_s:.2f} s"
            table.add(f"{rate / 1e6:.1f}", *read, *map(str, found), str(is_good))
    return 0 if is_right else 1


def are_right(found: Sequence[First], read_s: float, prefill_s: float) -> bool:
    """Whether prompts were read or run as is faster, and none came later than both would take."""
    if read_s * UNCLEAR < prefill_s and not all(each.is_read for each in found):
        return False
    if read_s > UNCLEAR * prefill_s and any(each.is_read for each in found):
        return False
    most_s = min(read_s, prefill_s) + UNCLEAR * prefill_s + LATE_S
    return all(each.seconds < most_s for each in found)


if __name__ == "__main__":
    sys.exit(main())
