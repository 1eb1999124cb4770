"""A file system whose calls fail, hang or kill the process at a named step.

As a program it writes nodes into a directory, over and over, until it dies.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.files import FileSystem
from tests.disk_cache.node_files import END_KINDS, NAMESPACE, TOKENS, contents_of, end_of, node

BIG = TOKENS | {"a": ("U8", (9 << 20,)), "b": ("F32", (1 << 18,)), "c": ("U8", (5,))}
BIG_END = {"ls0_delta.0": ("F32", (5 << 18,))}
STEPS = "create write sync rename sync_directory".split()


class FaultyFiles(FileSystem):
    """Calls `fault()` before the step named `before`, and after the one named `after`."""

    def __init__(self, fault: Callable[[], None], *, before: str = "", after: str = "") -> None:
        self._fault = fault
        self._points = {("before", before), ("after", after)}

    def at(self, when: str, step: str) -> None:
        if (when, step) in self._points:
            self._fault()

    def create(self, path: Path) -> FileIO:
        self.at("before", "create")
        raw = _Faulty(super().create(path), "wb", self)
        self.at("after", "create")
        return raw

    def open(self, path: Path) -> FileIO:
        self.at("before", "open")
        return _Faulty(super().open(path), "rb", self)

    def sync(self, raw: FileIO) -> None:
        self._around("sync", super().sync, raw)

    def rename(self, source: Path, target: Path) -> None:
        self._around("rename", super().rename, source, target)

    def sync_directory(self, path: Path) -> None:
        self._around("sync_directory", super().sync_directory, path)

    def _around(self, step: str, call: Callable[..., None], *args: object) -> None:
        self.at("before", step)
        call(*args)
        self.at("after", step)


class _Faulty(FileIO):
    """The file that `raw` was, with the faults of `files` in reading and writing."""

    def __init__(self, raw: FileIO, mode: str, files: FaultyFiles) -> None:
        self._raw = raw  # it closes the descriptor, and holds the lock until then
        self._files = files
        super().__init__(raw.fileno(), mode, closefd=False)

    def write(self, piece) -> int:
        self._files.at("before", "write")
        written = super().write(memoryview(piece)[: 3 << 20])  # less than asked for
        self._files.at("after", "write")
        return written

    def readinto(self, view) -> int | None:
        self._files.at("before", "readinto")
        return super().readinto(view)

    def close(self) -> None:
        super().close()
        self._raw.close()


def failing(number: int) -> Callable[[], None]:
    """A fault: the operating system's error of that number."""

    def fault() -> None:
        raise OSError(number, os.strerror(number))

    return fault


def hanging(until: threading.Event) -> Callable[[], None]:
    """A fault: nothing goes on until the event is set; then it fails."""

    def fault() -> None:
        until.wait()
        raise OSError(errno.EIO, "at last")

    return fault


def kill_this_process() -> None:
    """A fault: the process is gone at once."""
    os.kill(os.getpid(), signal.SIGKILL)


async def write_until_killed(root: Path, when: str, step: str) -> None:
    """Write the nodes 0, 1, 2... each with content of its own number."""
    files = FaultyFiles(kill_this_process, **{when: step})
    async with DiskTier(root, NAMESPACE, END_KINDS, files=files, min_free_bytes=0) as tier:
        print("ready", flush=True)
        for number in range(1 << 20):
            key = f"{number % 4:08x}"
            await tier.write(node(contents_of(number % 4, BIG), BIG, key=key))
            end = contents_of(number % 4, BIG_END)
            await tier.write(end_of(end, BIG_END, key=key))


if __name__ == "__main__":
    asyncio.run(write_until_killed(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
