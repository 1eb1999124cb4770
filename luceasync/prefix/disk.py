"""The disk tier: a node is written whole or not at all, and read as it was written or not at all.

Owns the threads, deadlines and outcomes of file work. Knows no tree, no eviction and no tensor
library; what lies where is the directory's.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Self

from luceasync.errors import ConfigError, CorruptNode, ForeignNode
from luceasync.prefix.codec import Buffer, Header, decode_header, verify
from luceasync.prefix.directory import BelowFloor, NodeDirectory, NodeMeta
from luceasync.prefix.file_threads import FileThreads, ThreadedFile, pieces
from luceasync.prefix.files import FileSystem, allocate, read_head

CLOSE_TIMEOUT_S = 30.0


class MissReason(StrEnum):
    """Why a node could not be read."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    IO_ERROR = "io_error"
    TIMEOUT = "timeout"


class WriteOutcome(StrEnum):
    """What became of a write."""

    WRITTEN = "written"
    BUSY = "busy"
    BELOW_FLOOR = "below_floor"
    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Miss:
    """A node that is not to be had; `detail` says what came and what was expected."""

    reason: MissReason
    detail: str


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A node as it was written: its bytes by tensor name, views of one buffer."""

    header: Header
    tensors: Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a write came to. Under any outcome but WRITTEN the node is not to be counted on.

    `detail` says what went wrong; with WRITTEN, that a power cut may still lose the file.
    """

    outcome: WriteOutcome
    num_bytes: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """What the tier has done since it was opened."""

    writes: Mapping[WriteOutcome, int]
    bytes_written: int
    reads: int
    hits: int
    misses: Mapping[MissReason, int]
    bytes_read: int
    quarantined: int


class DiskTier:
    """The node files of one namespace under `root`; entered with `async with`.

    Other processes may use the same directory. `max_pending_bytes` bounds what waits to be
    written; less than `min_free_bytes` of free space is never left by a write.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        *,
        min_free_bytes: int = 1 << 30,
        max_pending_bytes: int = 2 << 30,
        read_timeout_s: float = 30.0,
        write_timeout_s: float = 120.0,
        files: FileSystem | None = None,
    ) -> None:
        self._root = root
        self._namespace = namespace
        self._files = files or FileSystem()
        self._directory = NodeDirectory(self._files, root, namespace, min_free_bytes)
        self._max_pending_bytes = max_pending_bytes
        self._read_timeout_s = read_timeout_s
        self._write_timeout_s = write_timeout_s
        self._threads = FileThreads()
        self._writing = asyncio.Lock()
        self._pending_bytes = 0
        self._degraded = ""
        self._outcomes: Counter[WriteOutcome] = Counter()
        self._misses: Counter[MissReason] = Counter()
        self._hits = self._bytes_read = self._bytes_written = self._quarantined = 0

    def __repr__(self) -> str:
        return f"DiskTier({self._root / self._namespace}, {self._pending_bytes} bytes pending)"

    async def __aenter__(self) -> Self:
        """Make the directories. Raises ConfigError where that cannot be done."""
        try:
            await self._threads.submit(self._directory.make)
        except OSError as error:
            raise ConfigError(
                f"--kv-cache-dir {self._root}: {error}; expected a directory to write to"
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait until what was given up has left no temporary file, unless the disk hangs."""
        await self._threads.close(CLOSE_TIMEOUT_S)

    @property
    def degraded(self) -> str:
        """What went wrong with the disk last; empty again after a write that succeeded."""
        return self._degraded

    @property
    def pending_bytes(self) -> int:
        """Bytes of writes that have begun or wait to begin."""
        return self._pending_bytes

    def counters(self) -> DiskCounters:
        """A snapshot."""
        return DiskCounters(
            writes=dict(self._outcomes),
            bytes_written=self._bytes_written,
            reads=self._hits + self._misses.total(),
            hits=self._hits,
            misses=dict(self._misses),
            bytes_read=self._bytes_read,
            quarantined=self._quarantined,
        )

    async def write(self, key: str, header: bytes, buffers: Sequence[Buffer]) -> WriteResult:
        """Put a node under its key; what is there under the key is replaced.

        `buffers`: the tensors' bytes, contiguous, in the order of the encoded `header`; they must
        not change meanwhile. The file appears whole or not at all. Raises CorruptNode where header
        and buffers disagree; the disk's faults are outcomes.
        """
        num_bytes = len(header) + sum(memoryview(buffer).nbytes for buffer in buffers)
        decode_header(header, num_bytes, namespace=self._namespace, key=key)
        if self._pending_bytes and self._pending_bytes + num_bytes > self._max_pending_bytes:
            detail = f"{self._pending_bytes} bytes wait, {self._max_pending_bytes} are allowed"
            self._outcomes[WriteOutcome.BUSY] += 1
            return WriteResult(WriteOutcome.BUSY, num_bytes, detail)
        self._pending_bytes += num_bytes
        try:
            outcome, detail = await self._try_write(key, num_bytes, [header, *buffers])
        finally:
            self._pending_bytes -= num_bytes
        self._outcomes[outcome] += 1
        self._bytes_written += num_bytes if outcome is WriteOutcome.WRITTEN else 0
        self._degraded = detail
        return WriteResult(outcome, num_bytes, detail)

    async def read(self, key: str) -> NodeFile | Miss:
        """The node, checked to the last byte, or why not. Raises nothing but cancellation.

        What is damaged, or no regular file, is moved to the quarantine; nothing else is touched.
        """
        try:
            async with asyncio.timeout(self._read_timeout_s):
                node = await self._read_or_set_aside(key)
        except TimeoutError:
            self._degraded = f"node {key} was not read within {self._read_timeout_s} s"
            return self._miss(MissReason.TIMEOUT, self._degraded)
        except FileNotFoundError:
            return self._miss(MissReason.ABSENT, "no such file")
        except ForeignNode as error:
            return self._miss(MissReason.FOREIGN, str(error))
        except CorruptNode as error:
            return self._miss(MissReason.CORRUPT, str(error))
        except (OSError, MemoryError) as error:
            self._degraded = str(error) or "out of memory"
            return self._miss(MissReason.IO_ERROR, self._degraded)
        self._hits += 1
        self._bytes_read += node.header.file_bytes
        return node

    async def scan(self) -> list[NodeMeta]:
        """The nodes under `root`, of this namespace by their headers, of others by their names.

        Temporary files that no process writes any more are removed, damaged headers quarantined.
        """
        nodes, num_corrupt, faults = await self._threads.submit(self._directory.scan, time.time())
        self._quarantined += num_corrupt
        self._degraded = faults[-1] if faults else self._degraded
        return nodes

    async def touch(self, key: str) -> bool:
        """The node was used now, also for other processes; False where there is none."""
        path = self._directory.path(key)
        return await self._try(lambda: os.utime(path, follow_symlinks=False) is None)

    async def remove(self, key: str, namespace: str | None = None) -> bool:
        """Remove a node, of another namespace if it is named; False where there is none."""
        return await self._try(partial(self._files.remove, self._directory.path(key, namespace)))

    async def _try_write(
        self, key: str, num_bytes: int, buffers: list[Buffer]
    ) -> tuple[WriteOutcome, str]:
        try:
            async with asyncio.timeout(self._write_timeout_s), self._writing:
                return WriteOutcome.WRITTEN, await self._write_file(key, num_bytes, buffers)
        except TimeoutError:
            return WriteOutcome.TIMEOUT, f"expected within {self._write_timeout_s} s"
        except BelowFloor as error:
            return WriteOutcome.BELOW_FLOOR, str(error)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return WriteOutcome.NO_SPACE if is_full else WriteOutcome.IO_ERROR, str(error)

    async def _write_file(self, key: str, num_bytes: int, buffers: list[Buffer]) -> str:
        """Empty, or why the written file might not outlive a power cut."""
        path = self._directory.path(key)
        temporary = self._directory.temporary(key)
        create = partial(self._directory.create, temporary, num_bytes)
        discard = partial(self._files.remove, temporary)  # nothing is left to remove once renamed
        async with ThreadedFile(self._threads, create, discard) as file:
            await file.write(pieces(buffers))
            await file.call(self._files.sync, file.raw)
            await file.call(self._files.rename, temporary, path)
            try:
                await file.call(self._files.sync_directory, path.parent)
            except OSError as error:
                return str(error)
        return ""

    async def _read_or_set_aside(self, key: str) -> NodeFile:
        try:
            return await self._read_file(key)
        except CorruptNode:
            self._quarantined += await self._threads.submit(
                self._directory.set_aside, self._directory.path(key)
            )
            raise

    async def _read_file(self, key: str) -> NodeFile:
        async with ThreadedFile(
            self._threads, partial(self._files.open, self._directory.path(key))
        ) as file:
            head, file_bytes = await file.call(read_head, file.raw)
            decode = partial(decode_header, namespace=self._namespace, key=key)
            header = await file.call(decode, head, file_bytes)
            content = await file.call(allocate, file_bytes)
            content[: len(head)] = head
            num_bytes = len(head) + await file.read_into(content[len(head) :])
            if num_bytes != file_bytes:
                raise CorruptNode(f"{num_bytes} bytes: expected {file_bytes}")
            await file.call(verify, header, content)
        tensors = {slot.name: content[slot.begin : slot.end] for slot in header.slots}
        return NodeFile(header, tensors)

    def _miss(self, reason: MissReason, detail: str) -> Miss:
        self._misses[reason] += 1
        return Miss(reason, detail)

    async def _try(self, function: Callable[[], bool]) -> bool:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await self._threads.submit(function)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._degraded = str(error) or f"the disk did not answer in {self._read_timeout_s} s"
            return False
