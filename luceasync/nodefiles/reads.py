"""Nodes on their way from the disk: who waits for them, how long, and what came of it.

Owns the threads that read and the calls for which nobody waits any more. Knows no write.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Protocol

from luceasync.errors import CorruptNode, ForeignNode
from luceasync.node_words import MissReason
from luceasync.nodefiles.directory import NodeDirectory
from luceasync.nodefiles.faults import Faults
from luceasync.nodefiles.file_threads import FileThreads
from luceasync.nodefiles.hung_reads import HungReads
from luceasync.nodefiles.layout import Half
from luceasync.nodefiles.outcomes import Miss, miss_of
from luceasync.nodefiles.reader import NodeFile, with_own_end

NUM_READERS = min(8, 2 * len(os.sched_getaffinity(0)))  # more would wait for each other


class ReadNode(Protocol):
    """luceasync.nodefiles.reader.read_node, for the nodes of one namespace."""

    def __call__(self, path: Path, *, with_end: bool, is_given_up: object) -> NodeFile: ...


class NodeReads:
    """Reads nodes of one directory in threads of its own: no read waits for a disk that syncs."""

    def __init__(
        self, directory: NodeDirectory, read: ReadNode, faults: Faults, timeout_s: float
    ) -> None:
        self._directory = directory
        self._read = read
        self._faults = faults
        self._timeout_s = timeout_s
        self._threads = FileThreads(NUM_READERS)
        self._hung = HungReads(partial(faults.tell, "read"))
        self.misses: Counter[MissReason] = Counter()
        self.hits = self.bytes_read = self.quarantined = 0

    async def close(self, timeout_s: float) -> None:
        """Wait until nothing is being read, unless the disk hangs."""
        await self._threads.close(timeout_s)

    async def read(self, key: str, with_end: bool, timeout_s: float | None) -> NodeFile | Miss:
        """The node, or without its end only the span, checked to the last byte of that; or why not.
        An end that is damaged alone is told with the rest. Raises nothing but cancellation.

        It is given up after `timeout_s`, where that is less than the tier's own patience, and at
        once while one that was given up has not come back. Up to NUM_READERS are read at a time.
        What is damaged, or no regular file, is moved to the quarantine; nothing else is touched.
        """
        patience_s = min(self._timeout_s, timeout_s or self._timeout_s)
        if self._hung:
            self.misses[MissReason.IO_ERROR] += 1
            return Miss(MissReason.IO_ERROR, "the disk hangs: a read has not come back")
        try:
            async with asyncio.timeout(patience_s):
                node = await self._read_or_set_aside(key, with_end)
        except TimeoutError:
            miss = Miss(MissReason.IO_ERROR, f"node {key} was not read within {patience_s:.3g} s")
        except (CorruptNode, ForeignNode, MemoryError, OSError) as error:
            miss = miss_of(error)
        else:
            self._faults.tell("read")
            self.hits += 1
            self.bytes_read += node.num_bytes
            return node
        if miss.reason is MissReason.IO_ERROR:
            self._faults.tell("read", miss.detail)
        self.misses[miss.reason] += 1
        return miss

    async def _read_or_set_aside(self, key: str, with_end: bool) -> NodeFile:
        path, end_path = (self._directory.path(key, half=half) for half in Half)
        given_up = threading.Event()
        read = partial(self._read, is_given_up=given_up.is_set)

        def read_both() -> NodeFile:
            node = read(path, with_end=with_end)
            return with_own_end(node, partial(read, end_path, with_end=True)) if with_end else node

        call = self._threads.submit(read_both)
        try:
            node = await asyncio.shield(call)
        except CorruptNode:
            await self._set_aside(path)
            raise
        finally:
            given_up.set()
            if not call.done():
                self._hung.leave(call)
        if isinstance(node.end_fault, CorruptNode):
            await self._set_aside(end_path)
        return node

    async def _set_aside(self, path: Path) -> None:
        self.quarantined += await self._threads.submit(self._directory.set_aside, path)
