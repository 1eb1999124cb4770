"""A server for each measurement, and what is watched of it: /health, memory, descriptors."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20
CHAT = "/v1/chat/completions"
SAID = '"messages":[{"role":"user","content":"What does os.getcwd do?"}]'
NUM_DESCRIPTORS = 1024
ROOT = Path(__file__).parents[3]


class Server:
    """A server of the bundled model in its own process, limited to NUM_DESCRIPTORS descriptors.

    `checkout`: the checkout whose code it runs, `module`: what is run of it.
    """

    def __init__(
        self, checkout: Path = ROOT, flags: Sequence[str] = (), module: str = "luceasync"
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", "--port", "0", *flags],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stderr=subprocess.PIPE,
        )
        limits = (NUM_DESCRIPTORS, NUM_DESCRIPTORS)
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, limits)
        self.port = 0
        self.told: list[bytes] = []  # what it wrote that is more than a request's line
        assert self.process.stderr is not None
        for line in iter(self.process.stderr.readline, b""):
            if found := re.search(rb"https?://127.0.0.1:(\d+)", line):
                self.port = int(found[1])
            if line.startswith(b"Ready"):
                break
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in iter(self.process.stderr.readline, b""):
            if re.search(rb"Traceback|Error|Exception|WARNING|ERROR", line):
                self.told.append(line)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def speak(self, address: str | None = None) -> http.client.HTTPConnection:
        """A new connection. Each source `address` counts as another client."""
        source = None if address is None else (address, 0)
        return http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=120, source_address=source
        )

    def get(self, path: str) -> bytes:
        connection = self.speak()
        connection.request("GET", path, headers={"connection": "close"})
        return connection.getresponse().read()

    def post(self, body: bytes) -> tuple[int, bytes]:
        connection = self.speak()
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()

    def warm(self) -> None:
        """Answer once, so that everything made at the first request is there."""
        self.post(f'{{{SAID},"max_tokens":8,"n":2}}'.encode())

    @property
    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB

    @property
    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))


@contextmanager
def watched(server: Server) -> Iterator[list[float]]:
    """Poll /health; yields the longest answer time in seconds and the most memory."""
    seconds: list[float] = [0.0, 0.0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            begin = time.perf_counter()
            try:
                server.get("/health")
            except OSError:
                seconds[0] = float("inf")
            seconds[0] = max(seconds[0], time.perf_counter() - begin)
            seconds[1] = max(seconds[1], server.memory_mib)
            ended.wait(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()


def chat(content: str, **fields: object) -> bytes:
    """A request's body."""
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def posted_head(num_bytes: int) -> bytes:
    """The head of a chat request whose body has this many bytes."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {num_bytes}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode()
