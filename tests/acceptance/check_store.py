"""Servers of different splits over one bucket: what one prefills another takes up, whatever the
store does. CPU.

    python -m tests.acceptance.check_store --moto PYTHON [--kills 4]

PYTHON has the package `moto[server]`, an S3 server for tests. In float32 each answer is that of a
server without a store. Exit status 1 if one is not, or comes later than it may.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from luceasync.bench.servers import Client, server
from tests.acceptance import command

BUCKET = "nodes"
NUM_SENTENCES = 260  # of a prompt, which goes up when it is used again
NUM_ANSWER_TOKENS = 24
DEADLINE_S = 120.0
SPLITS = ((), ("--target-devices", "cpu:0,cpu:1"), ("--target-devices", "cpu:0,cpu:1,cpu:2"))
SECRET = "the secret of these servers"


class Proxy:
    """Passes connections on to the store, `delay_s` later, in a thread of its own."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._target = port
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait(DEADLINE_S)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        listening = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = listening.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(self._pass(reader, to_writer), self._pass(to_reader, writer))
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(1 << 16):
                await asyncio.sleep(self.delay_s)
                writer.write(piece)
                await writer.drain()
            writer.write_eof()


@contextmanager
def moto(python: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """An S3 server with an empty bucket: its port, and what ends it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with subprocess.Popen(
        [python, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            made = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
            deadline_s = time.monotonic() + DEADLINE_S
            while True:
                with suppress(OSError):
                    urllib.request.urlopen(made, timeout=5).close()
                    break
                assert time.monotonic() < deadline_s, "moto did not start"
                time.sleep(0.1)
            yield port, process.kill
        finally:
            process.kill()


def prompt(number: int) -> list[dict[str, Any]]:
    """A long text, and a question."""
    source = random.Random(number)
    words = "def list join range value index return string while tuple class open".split()
    text = ". ".join(" ".join(source.choices(words, k=10)) for _ in range(NUM_SENTENCES))
    return [{"role": "user", "content": f"{text}. What does it say?"}]


class Answered:
    """An answer: its text, how much of the prompt was cached, and how long it took."""

    def __init__(self, client: Client, number: int) -> None:
        body = {"messages": prompt(number), "temperature": 0, "max_tokens": NUM_ANSWER_TOKENS}
        began_s = time.perf_counter()
        with closing(Client(client.url)) as fresh:  # an idle connection may have been closed
            found = fresh.post("/v1/chat/completions", body | {"ignore_eos": True})
        self.seconds = time.perf_counter() - began_s
        self.text = found["choices"][0]["message"]["content"]
        usage = found["usage"]
        self.num_prompt = usage["prompt_tokens"]
        self.num_cached = usage["prompt_tokens_details"]["cached_tokens"]


class StoreCheck:
    """The servers, their store, and what each row of the table shows."""

    def __init__(self, folder: Path, stack: ExitStack, port: int, end_store: Callable[[], None]):
        self._folder = folder
        self._stack = stack
        self._end_store = end_store
        self._proxy = Proxy(port)
        self._env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._proxy.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }
        endpoint = f"http://127.0.0.1:{port}"
        self._bucket = S3Store(
            BUCKET,
            endpoint=endpoint,
            access_key_id="a",
            secret_access_key="b",
            region="us-east-1",
            client_options={"allow_http": True},
        )
        (folder / "secret").write_text(SECRET, encoding="utf-8")
        self._alone = stack.enter_context(self._server("alone", (), store=False))
        self._num_servers = 0
        self._slowest_s = 0.0

    @contextmanager
    def _server(self, name: str, flags: Sequence[str], *, store: bool = True) -> Iterator[Client]:
        flags = ["--dtype", "fp32", "--parallel", "1", "--draft", "none", *flags]
        flags += ["--kv-cache-dir", str(self._folder / name)]
        if store:
            flags += ["--kv-store", f"s3://{BUCKET}/shared"]
            flags += ["--kv-store-key-file", str(self._folder / "secret")]
        with server(flags, env=self._env) as client:
            yield client

    def _new(self, split: Sequence[str] = ()) -> Client:
        """A server with an empty directory."""
        self._num_servers += 1
        return self._stack.enter_context(self._server(f"s{self._num_servers}", split))

    def _objects(self) -> dict[str, int]:
        return {m["path"]: m["size"] for page in obstore.list(self._bucket) for m in page}

    def _uploaded(self, num_before: int) -> float:
        """Wait until more objects are there, and no more come; since when they are."""
        deadline_s, last, since_s = time.monotonic() + DEADLINE_S, num_before, time.monotonic()
        while time.monotonic() < deadline_s:
            now = len(self._objects())
            if now != last:
                last, since_s = now, time.monotonic()
            elif now > num_before and time.monotonic() - since_s > 1.0:
                break
            time.sleep(0.05)
        return since_s

    def rows(self, num_kills: int) -> Iterator[tuple[str, Answered, bool]]:
        """What was done, the answer, and whether it is right."""
        expected = {n: Answered(self._alone, n) for n in range(4 + num_kills)}
        self._slowest_s = max(each.seconds for each in expected.values())
        a, b, c = (self._new(split) for split in SPLITS)

        def row(what: str, found: Answered, number: int, *, is_cached: bool = False):
            is_right = found.text == expected[number].text
            if is_cached:
                is_right &= found.num_cached >= 0.9 * found.num_prompt
            return what, found, is_right

        yield row("first, on A", Answered(a, 0), 0)
        yield row("again, on A", Answered(a, 0), 0, is_cached=True)
        self._uploaded(0)
        yield row("then on B, two shards", Answered(b, 0), 0, is_cached=True)
        yield row("then on C, three shards", Answered(c, 0), 0, is_cached=True)
        for kill in range(num_kills):
            number = 4 + kill
            num_before = len(self._objects())
            victim = self._new()
            for _ in range(2):
                Answered(victim, number)
            delay = random.Random(kill).uniform(0.0, 0.3)
            while len(self._objects()) == num_before and delay > 0.15:
                time.sleep(0.01)  # within the upload; the others within the write
            time.sleep(delay / 3)
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            yield row(
                f"A killed {delay:.2f} s after the answer, then on B", Answered(b, number), number
            )
        yield from self._damaged(row)
        yield from self._slow(row, a)

    def _damaged(self, row: Any) -> Iterator[tuple[str, Answered, bool]]:
        """Objects that are not what their names say, read by new servers."""
        objects = self._objects()
        names = [name for name, size in objects.items() if size > 1 << 16]
        contents = {name: bytes(obstore.get(self._bucket, name).bytes()) for name in objects}
        whole = names[0]
        for what, change in (
            ("all truncated", lambda name: contents[name][:-1000]),
            ("all another node's", lambda name: contents[whole]),
            (
                "all of one byte changed",
                lambda name: bytes([contents[name][0] ^ 1]) + contents[name][1:],
            ),
            ("all empty", lambda name: b""),
        ):
            for name in objects:
                obstore.put(self._bucket, name, change(name))
            yield row(f"objects {what}, a new server", Answered(self._new(), 0), 0)
        for name, content in contents.items():
            obstore.put(self._bucket, name, content)
        (self._folder / "secret").write_text("the secret of somebody else", encoding="utf-8")
        found = Answered(self._new(), 0)
        yield row("written with another secret, a new server", found, 0)
        assert found.num_cached == 0, "believed without the secret"
        (self._folder / "secret").write_text(SECRET, encoding="utf-8")
        yield row("whole again, a new server", Answered(self._new(), 0), 0, is_cached=True)

    def _slow(self, row: Any, a: Client) -> Iterator[tuple[str, Answered, bool]]:
        """A store that is slow, and then gone: no answer later than its patience."""
        fresh = self._new()
        for what, delay_s, number in (("0.5 s a packet late", 0.5, 1), ("gone", 0.0, 2)):
            self._proxy.delay_s = delay_s
            if what == "gone":
                self._end_store()
            found = Answered(fresh, number)
            name, _, is_right = row(f"the store is {what}, a prompt that nobody has", found, number)
            yield name, found, is_right and found.seconds < 4 * self._slowest_s + 5
        yield row("the store is gone, what A has", Answered(a, 0), 0, is_cached=True)


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def main() -> int:
    """Run all rows; the exit status."""
    parser = command.parser(__doc__)
    parser.add_argument("--moto", required=True, metavar="PYTHON")
    parser.add_argument("--kills", type=int, default=4, help="default: 4")
    options = parser.parse_args()
    report, is_right = command.open_report(options), True
    table = report.table(("what", "prompt", "cached", "seconds", "right"))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        check = StoreCheck(Path(name), stack, *stack.enter_context(moto(options.moto)))
        for what, found, is_good in check.rows(options.kills):
            seconds = f"{found.seconds:.2f}"
            table.add(what, found.num_prompt, found.num_cached, seconds, str(is_good))
            is_right &= is_good
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
