"""A server over four processes, three of them backends that can be told to misbehave.

Owns its processes and its directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.acceptance.hostile.server import ROOT, Server

OFFERS = ("hip:0=cpu:0", "cuda:0=cpu:0", "hip:1=cpu:0")
DEVICES = "cpu:0,hip:0,cuda:0,hip:1"
BACKEND, FORKING = "tests.acceptance.chaos.backend", "tests.acceptance.chaos.forking"
DEADLINE_S, PAUSE_S = 120.0, 0.01
SETTLE_S = 0.5
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)  # of asyncio.to_thread


@dataclass(frozen=True)
class Kept:
    """Resources of a server's process."""

    descriptors: int
    memory_maps: int
    threads: int

    def is_no_more_than(self, before: Kept) -> bool:
        """Whether nothing was leaked since `before`, but for threads of Python's pool."""
        return (
            self.descriptors <= before.descriptors
            and self.memory_maps <= before.memory_maps
            and self.threads <= before.threads + POOL_THREADS
        )


class House:
    """A server that is ready. `layers`: those of each backend, in order; `is_forking`: backends are
    forks.
    """

    def __init__(self, transport: str, *, is_forking: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        program = self.folder / "backend"
        offers = " ".join(f"--offer {offer}" for offer in OFFERS)
        program.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={ROOT}\n"
            f'exec {sys.executable} -m {BACKEND} {self.folder} {offers} "$@"\n',
            encoding="utf-8",
        )
        program.chmod(0o755)
        flags = ["--target-devices", DEVICES, "--target-shard-ipc-bin", str(program)]
        flags += ["--ipc-transport", transport, "--dtype", "fp32", "--trust-cache-salt"]
        flags += ["--kv-cache-dir", str(self.folder / "cache"), "--kv-cache-min-tokens", "1"]
        flags += ["--prefix-cache-memory", "256M", "--draft", "none", "--parallel", "2"]
        self.server = Server(ROOT, flags, FORKING if is_forking else "luceasync")
        self.layers = [layers for layers, _ in self._found()]

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def is_alive(self) -> bool:
        return self.server.process.poll() is None

    def wish_path(self, layers: str) -> Path:
        """The file that the backend of these layers reads."""
        return self.folder / layers

    def pid_of(self, layers: str) -> int:
        """The current process id of the backend of these layers."""
        return dict(self._found())[layers]

    def _found(self) -> list[tuple[str, int]]:
        found = []
        for process in psutil.Process(self.server.process.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.NoSuchProcess:  # it ends just now
                continue
            if "--layers" in words:
                found.append((words[words.index("--layers") + 1], process.pid))
        return sorted(found, key=lambda pair: int(pair[0].partition(":")[0]))

    def ready(self) -> dict[str, object]:
        """The answer of /ready."""
        answer: dict[str, object] = json.loads(self.server.get("/ready"))
        return answer

    def wait_until_ready(self) -> float:
        """Wait until every process works; returns the seconds."""
        begun = time.perf_counter()
        until(lambda: self.ready()["ready"] is True, "the server is not ready again")
        return time.perf_counter() - begun

    def calm(self) -> Kept:
        """The server's resources once all connections are closed."""
        time.sleep(SETTLE_S)
        return self.kept()

    def kept(self) -> Kept:
        """The current resources of the server's process."""
        pid = self.server.process.pid
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
        return Kept(
            len(os.listdir(f"/proc/{pid}/fd")),
            maps.count("memfd:luceasync"),
            len(os.listdir(f"/proc/{pid}/task")),
        )

    def end(self) -> float:
        """Send SIGTERM if the server lives, and wait until nothing of it is left; returns the
        seconds. Exits with a message if something stays.
        """
        begun = time.perf_counter()
        if self.is_alive:
            self.server.process.send_signal(signal.SIGTERM)
        self.server.process.wait(DEADLINE_S)
        until(lambda: not self._left(), "processes are left:", self._left)
        assert self.server.process.stderr is not None
        shutil.rmtree(self.folder)
        return time.perf_counter() - begun

    def _left(self) -> list[str]:
        """Processes of this server, wherever they hang now."""
        mark = str(self.folder)
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if mark in words and process.pid != os.getpid():
                found.append(f"{process.pid} {words}")
        return found


def until(is_so: Callable[[], bool], words: str, told: Callable[[], object] = str) -> None:
    """Wait for a condition. Exits with a message if it does not come in time; `told` adds what
    there is.
    """
    for _ in range(round(DEADLINE_S / PAUSE_S)):  # a machine that was stopped meanwhile counts less
        if is_so():
            return
        time.sleep(PAUSE_S)
    raise SystemExit(f"{words} {told()}")
