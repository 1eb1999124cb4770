"""The disk tier: a file is written whole or not at all, and read as it was written or not at all.

Owns the threads, deadlines and outcomes of file work. Knows no tree, no eviction and no tensor
library; NodeDirectory knows what lies where.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar

from luceasync.disk_cache.codec import END_PARTS, Buffer, EncodedFile, EndKinds, Half
from luceasync.disk_cache.directory import BelowFloor, NodeDirectory
from luceasync.disk_cache.files import (
    FileSystem,
    FileThreads,
    HungReads,
    ThreadedFile,
    allocate,
    pieces,
    timed_read,
)
from luceasync.disk_cache.keeper import KeeperLease
from luceasync.disk_cache.listing import NUM_PARTS, Listing, NodeMeta, Scan, changes
from luceasync.disk_cache.object_store import (
    MIN_UPLOAD_TOKENS,
    NodeName,
    ObjectStore,
    StoreSpec,
)
from luceasync.disk_cache.outcomes import (
    DiskCounters,
    Faults,
    Miss,
    WriteOutcome,
    WriteResult,
    is_gone,
    miss_of,
    outcome_of,
)
from luceasync.disk_cache.reader import (
    Allocate,
    NodeFile,
    ReadCancelled,
    ReadProgress,
    read_node,
    with_own_end,
)
from luceasync.disk_cache.upkeep import Name, Upkeep
from luceasync.errors import ConfigError, CorruptNode, ForeignNode
from luceasync.nodes import MissReason

NUM_READERS = min(8, 2 * len(os.sched_getaffinity(0)))  # more would wait for each other
CLOSE_TIMEOUT_S = 30.0
MEASURED_BYTES, MEASURE_LIMIT_S = 8 << 20, 0.5  # of each file that is measured

T = TypeVar("T")


class NodeReader(Protocol):
    """luceasync.disk_cache.reader.read_node, for the nodes of one namespace."""

    def __call__(
        self, path: Path, *, with_end: bool, is_cancelled: object, advance: object
    ) -> NodeFile: ...


class NodeReads:
    """Reads nodes of one directory in threads of its own: no read waits for a write's fsync."""

    def __init__(
        self, directory: NodeDirectory, read: NodeReader, faults: Faults, timeout_s: float
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

    async def read(
        self, key: str, with_end: bool, timeout_s: float | None, progress: ReadProgress
    ) -> NodeFile | Miss:
        """The node, or without its end only the span, checked to its last byte; or why not. An end
        that is damaged alone is reported with the rest. Raises nothing but cancellation.

        The read ends early once `progress` is given up. It is abandoned after `timeout_s`, if that
        is less than the tier's own timeout, and not tried while an abandoned one has not returned.
        Up to NUM_READERS are read at a time. A file that is damaged, or not regular, is moved to
        the quarantine; no other is touched.
        """
        patience_s = min(self._timeout_s, timeout_s or self._timeout_s)
        if self._hung:
            self.misses[MissReason.IO_ERROR] += 1
            return Miss(MissReason.IO_ERROR, "the disk hangs: a read has not returned")
        is_fault = True
        try:
            async with asyncio.timeout(patience_s):
                node = await self._read_or_set_aside(key, with_end, progress)
        except TimeoutError:
            miss = Miss(MissReason.IO_ERROR, f"node {key} was not read within {patience_s:.3g} s")
        except ReadCancelled:
            miss = Miss(MissReason.PREFILL_IS_FASTER, f"node {key}: running its tokens is faster")
        except (CorruptNode, ForeignNode, MemoryError, OSError) as error:
            miss = miss_of(error)
            is_fault = not (isinstance(error, OSError) and is_gone(error))
        else:
            self._faults.tell("read")
            self.hits += 1
            self.bytes_read += node.num_bytes
            return node
        if is_fault and miss.reason is MissReason.IO_ERROR:
            self._faults.tell("read", miss.detail, partial(self._directory.try_read, key))
        self.misses[miss.reason] += 1
        return miss

    async def _read_or_set_aside(
        self, key: str, with_end: bool, progress: ReadProgress
    ) -> NodeFile:
        path, end_path = (self._directory.path(key, half=half) for half in Half)
        cancelled = threading.Event()
        read = partial(
            self._read,
            is_cancelled=lambda: cancelled.is_set() or progress.is_given_up,
            advance=progress.advance,
        )

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
            cancelled.set()
            if not call.done():
                self._hung.leave(call)
        if isinstance(node.end_fault, CorruptNode):
            await self._set_aside(end_path)
        return node

    async def _set_aside(self, path: Path) -> None:
        self.quarantined += await self._threads.submit(self._directory.set_aside, path)


class DiskTier:
    """The node files of one namespace under `root`; entered with `async with`.

    Other processes may use the same directory. `max_pending_bytes` bounds what waits to be
    written; a write never leaves less than `min_free_bytes` of free space. Nodes are read into
    memory from `allocate(num_bytes)`, which is called from several threads and may raise
    MemoryError. `end_kinds`: see luceasync.disk_cache.codec. `is_shared`: servers on other hosts
    use the directory, and one of all keeps its budget. `store`: what holds nodes behind it.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        end_kinds: EndKinds,
        *,
        min_free_bytes: int = 1 << 30,
        max_pending_bytes: int = 2 << 30,
        read_timeout_s: float = 30.0,
        scan_timeout_s: float = 120.0,
        write_timeout_s: float = 120.0,
        allocate: Allocate = allocate,
        files: FileSystem | None = None,
        is_shared: bool = False,
        store: StoreSpec | None = None,
    ) -> None:
        self._root = root
        self._namespace = namespace
        self._files = files or FileSystem()
        self.end_kinds = end_kinds
        self._directory = NodeDirectory(self._files, root, namespace, min_free_bytes, end_kinds)
        self._max_pending_bytes = max_pending_bytes
        self._read_timeout_s = read_timeout_s
        self._scan_timeout_s = scan_timeout_s
        self._write_timeout_s = write_timeout_s
        self.is_shared = is_shared
        self._lease = KeeperLease(self._files, root)
        self._store_spec = store
        self._store: ObjectStore | None = None
        self._threads = FileThreads()
        self._writing = asyncio.Lock()
        self._scanning = asyncio.Lock()
        self._listings: dict[str, Listing] = {}
        self._num_scans = 0
        self._pending_bytes = 0
        self._faults = Faults()
        self._probe: asyncio.Future[None] | None = None
        self._reads = NodeReads(
            self._directory,
            partial(
                read_node,
                self._files,
                namespace=namespace,
                end_kinds=end_kinds,
                allocate=allocate,
            ),
            self._faults,
            read_timeout_s,
        )
        self._outcomes: Counter[WriteOutcome] = Counter()
        self._bytes_written = self._quarantined = 0

    def __repr__(self) -> str:
        return f"DiskTier({self._root / self._namespace}, {self._pending_bytes} bytes pending)"

    async def __aenter__(self) -> Self:
        """Make the directories, and open the store. Raises ConfigError if that fails."""
        try:
            await self._threads.submit(self._directory.make)
        except OSError as error:
            raise ConfigError(
                f"--kv-cache-dir {self._root}: {error}; expected a directory to write to"
            ) from None
        if self._store_spec is not None:
            self._store = ObjectStore(self._store_spec, self._directory, self._namespace)
            await self._store.check()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait until abandoned calls have removed their temporary files, unless the disk hangs."""
        if self.is_shared:
            await self._try(self._lease.release, None)
        if self._store is not None:
            await self._store.close()
        await self._reads.close(CLOSE_TIMEOUT_S)
        await self._threads.close(CLOSE_TIMEOUT_S)

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def degraded(self) -> str:
        """What is wrong with the disk; empty once work of each kind that had failed has succeeded.
        Paths are relative: clients may see it.
        """
        faults = [str(self._faults).replace(f"{self._root}{os.sep}", "")]
        faults += [] if self._store is None else [self._store.degraded]
        return "; ".join(filter(None, faults))

    @property
    def pending_bytes(self) -> int:
        """Bytes of writes that have begun or wait."""
        return self._pending_bytes

    def counters(self) -> DiskCounters:
        """A snapshot."""
        reads = self._reads
        return DiskCounters(
            writes=dict(self._outcomes),
            bytes_written=self._bytes_written,
            reads=reads.hits + reads.misses.total(),
            hits=reads.hits,
            misses=dict(reads.misses),
            bytes_read=reads.bytes_read,
            quarantined=self._quarantined + reads.quarantined,
        )

    @property
    def has_store(self) -> bool:
        """Whether there is a store behind it."""
        return self._store_spec is not None

    @property
    def store_counts(self) -> dict[str, int]:
        """What was asked of the store since it was opened, by name; empty without one."""
        return {} if self._store is None else self._store.counts

    async def write(self, file: EncodedFile) -> WriteResult:
        """Write half a node under its key, in place of an older file.

        The file appears whole or not at all. Faults of the disk are outcomes.
        """
        assert file.metadata.namespace == self._namespace, file.metadata.namespace
        num_bytes = file.num_bytes
        if self._pending_bytes and self._pending_bytes + num_bytes > self._max_pending_bytes:
            detail = f"{self._pending_bytes} bytes wait, {self._max_pending_bytes} are allowed"
            self._outcomes[WriteOutcome.BUSY] += 1
            return WriteResult(WriteOutcome.BUSY, num_bytes, detail)
        self._pending_bytes += num_bytes
        try:
            path = self._directory.path(file.metadata.key, half=file.half)
            content = [file.header, *file.buffers]
            outcome, detail = await self._try_write(path, num_bytes, content)
        finally:
            self._pending_bytes -= num_bytes
        self._outcomes[outcome] += 1
        self._bytes_written += num_bytes if outcome is WriteOutcome.WRITTEN else 0
        self._faults.tell("write", detail, partial(self._directory.try_write, num_bytes))
        is_long = file.metadata.end >= MIN_UPLOAD_TOKENS
        if self._store is not None and is_long and outcome is WriteOutcome.WRITTEN:
            self._store.offer(NodeName(file.metadata.key, file.half))
        return WriteResult(outcome, num_bytes, detail)

    async def read(
        self,
        key: str,
        *,
        with_end: bool = True,
        timeout_s: float | None = None,
        progress: ReadProgress | None = None,
    ) -> NodeFile | Miss:
        return await self._reads.read(key, with_end, timeout_s, progress or ReadProgress())

    async def measure(self, keys: Sequence[str]) -> tuple[int, float]:
        """(bytes, seconds) of a short read of these nodes' rows, as restores read them; (0, 0.0) if
        they cannot be read.
        """
        paths = [self._directory.path(key) for key in keys[:NUM_READERS]]
        read = partial(timed_read, self._files, paths, MEASURED_BYTES, MEASURE_LIMIT_S)
        return await self._try(read, (0, 0.0)) if paths else (0, 0.0)

    async def scan(self) -> Scan:
        """The nodes under `root`, those of other namespaces by name only, and what is new or gone
        since the last scan, whichever process did it; see NodeDirectory.scan. If the disk cannot be
        read now, nothing has changed. Of a shared directory, new and removed names are told each
        time, and other changes by parts, one in each scan.
        """
        async with self._scanning:
            before = self._listings
            part = self._num_scans % NUM_PARTS if self.is_shared and before else None
            self._num_scans += 1
            try:
                async with asyncio.timeout(self._scan_timeout_s):
                    self._listings, num_corrupt = await self._threads.submit(
                        self._directory.scan, time.time(), before, part
                    )
            except OSError as error:
                self._faults.tell("scan", str(error) or f"no scan within {self._scan_timeout_s} s")
                return replace(changes(before, before), is_whole=False)
        self._quarantined += num_corrupt
        faults = [fault for listing in self._listings.values() for fault in listing.faults]
        self._faults.tell("scan", faults[-1] if faults else "")
        return changes(before, self._listings)

    async def look_again(self) -> None:
        """Find out whether a disk that had faults has healed: `degraded` is empty then. No-op while
        an earlier attempt has not returned.
        """
        for work, probe in self._faults.probes.items():
            if self._probe is not None and not self._probe.done():
                return
            self._probe = self._threads.submit(probe)
            try:
                async with asyncio.timeout(self._read_timeout_s):
                    await asyncio.shield(self._probe)
            except OSError:
                continue
            self._faults.tell(work)

    async def find(self, wanted: Mapping[NodeName, float]) -> list[NodeMeta]:
        """Those of the wanted nodes that are there, whether or not a scan has listed them. What the
        directory lacks comes from the store, if there is one, within so many seconds each.
        """
        find = partial(self._directory.find, {name.key for name in wanted})
        none: list[NodeMeta] = []
        found = await self._try(find, none)
        if self._store is None:
            return found
        there = {meta.key: meta for meta in found}
        absent = [name for name in wanted if not _holds(there.get(name.key), name.half)]
        async with asyncio.TaskGroup() as tasks:
            fetches = [
                tasks.create_task(self._fetch(self._store, name, wanted[name])) for name in absent
            ]
        come = {name.key for name, fetch in zip(absent, fetches, strict=True) if fetch.result()}
        if not come:
            return found
        found = await self._try(find, none)
        for key in come - {meta.key for meta in found}:  # not what its name says
            await self.quarantine(key)
        return found

    async def _fetch(self, store: ObjectStore, name: NodeName, patience_s: float) -> bool:
        try:
            return await store.fetch(name, patience_s)
        except OSError as error:
            self._faults.tell("write", str(error), partial(self._directory.try_write, 0))
            return False

    async def upload(self) -> None:
        """Bring to the store what it lacks, until cancelled. No-op without one."""
        if self._store is not None:
            await self._store.upload()

    async def keep(self) -> bool:
        """Whether this server keeps the budget of the directory for the next LEASE_S. Called every
        RENEW_S where the directory is shared.
        """
        return await self._try(self._lease.renew, False)

    async def touch(self, keys: Sequence[str]) -> int:
        """Mark nodes as used now, for other processes too; how many of them exist."""
        if self._store is not None:
            for name in itertools.starmap(NodeName, itertools.product(keys, Half)):
                self._store.offer(name)
        return await self._try(partial(self._directory.touch, keys), 0)

    async def remove(self, key: str, namespace: str | None = None) -> int:
        """Remove a node, of another namespace if one is named; the bytes that were freed, 0 if
        there was none.
        """
        return await self._try(partial(self._directory.remove, key, namespace), 0)

    async def remove_others(self, names: Collection[Name], num_bytes: int) -> int:
        """Remove nodes of these namespaces and keys, the least recently used first, until so many
        bytes are free; the bytes that were freed.
        """
        upkeep = Upkeep(self._root, self.end_kinds)
        return await self._try(partial(upkeep.shed, frozenset(names), num_bytes), 0)

    async def remove_end(self, key: str) -> int:
        """Remove the file of a node's end, but not that of its rows; see remove."""
        return await self._try(partial(self._directory.remove_end, key), 0)

    async def quarantine(self, key: str) -> None:
        """Quarantine a node that is whole, but not what its name says."""
        for path in (self._directory.path(key, half=half) for half in Half):
            self._quarantined += await self._try(partial(self._directory.set_aside, path), 0)

    async def _try_write(
        self, path: Path, num_bytes: int, buffers: list[Buffer]
    ) -> tuple[WriteOutcome, str]:
        try:
            async with asyncio.timeout(self._write_timeout_s), self._writing:
                return WriteOutcome.WRITTEN, await self._write_file(path, num_bytes, buffers)
        except BelowFloor as error:
            return WriteOutcome.BELOW_FLOOR, str(error)
        except OSError as error:
            return outcome_of(error), str(error) or f"expected within {self._write_timeout_s} s"

    async def _write_file(self, path: Path, num_bytes: int, buffers: list[Buffer]) -> str:
        """Empty, or why the written file might not survive a power cut."""
        temporary = self._directory.temporary(path.stem)
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

    async def _try(self, function: Callable[[], T], otherwise: T) -> T:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                result = await self._threads.submit(function)
        except OSError as error:
            if is_gone(error):
                return otherwise
            words = str(error) or f"no answer within {self._read_timeout_s} s"
            self._faults.tell("upkeep", words, partial(self._directory.try_write, 0))
            return otherwise
        self._faults.tell("upkeep")
        return result


def _holds(meta: NodeMeta | None, half: Half) -> bool:
    """Whether the node's files have that half."""
    return meta is not None and (half is Half.ROWS or bool(meta.parts & END_PARTS))
