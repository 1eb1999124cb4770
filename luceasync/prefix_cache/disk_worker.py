"""Turns orders of the engine's thread into work on a cache directory, on the event loop.

Owns these jobs from the order to the outcome, and the encoding of a tensor in a file. Decides
nothing: it reads, writes and removes what it is ordered to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import nlargest

import torch
from torch import Tensor

from luceasync.disk_cache.codec import (
    EncodedFile,
    NodePart,
    SealedTensor,
    checksum,
    encode_file,
    file_order,
    header_bytes_at_most,
)
from luceasync.disk_cache.disk import NUM_READERS, DiskTier
from luceasync.disk_cache.keeper import RENEW_S
from luceasync.disk_cache.listing import NodeMeta, Scan, misplaced
from luceasync.disk_cache.metadata import NodeMetadata
from luceasync.disk_cache.object_store import NodeName
from luceasync.disk_cache.outcomes import Miss, WriteOutcome
from luceasync.disk_cache.reader import NodeFile, ReadProgress
from luceasync.errors import CorruptNode
from luceasync.nodes import MissReason, NodeKey
from luceasync.prefix_cache.cache import PrefixCache
from luceasync.prefix_cache.disk_orders import (
    FetchedNode,
    FindOrder,
    HalfNode,
    ReadOrder,
    WriteReport,
)
from luceasync.prefix_tree.node import DISK, KEY_BYTES, NOWHERE, Node
from luceasync.status import CacheStatus

log = logging.getLogger(__name__)

RESCAN_S = 30.0
LOOK_AGAIN_S = 5.0
RESCAN_WHEN_WRITING_S = 1.0  # other servers may write too, and all files count towards the budget
FIND_TIMEOUT_S = 1.0  # for the directory: a prompt is waiting for it
LEAST_MEASURED_BYTES = 5 << 20  # of a file that is suitable to measure the disk
PROGRESS_S = 0.01  # between two reports on reads in progress
SCAN_SHARE = 0.05  # at most this share of the time, while nodes are written
# Where other servers write too: prompts wait for their files, which also count towards the budget.
SHARED_SCAN_SHARE = 0.2
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int64: "I64",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
Tell = Callable[[Callable[[PrefixCache], None]], None]
Job = Callable[[DiskTier], Awaitable[object]]
Note = Callable[[Sequence[Node], Sequence[NodeKey]], None]


class DiskWorker:
    """The implementation of DiskOrders, whose methods are called from the engine's thread; the
    other methods belong to the event loop. `tell` delivers outcomes to the engine's thread."""

    def __init__(
        self, split: Sequence[int], tell: Tell, note: Note = lambda added, removed: None
    ) -> None:
        """`split`: the first layer of each shard, by which tensors are named. `note` is called in a
        worker thread with the nodes that a scan has found, and the keys of removed ones."""
        self._split = tuple(split)
        self._tell, self._note = tell, note
        self._loop = asyncio.get_running_loop()
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._epoch = 0  # number of the index that gives orders; engine's thread only
        # In order: a node is written after its parent, and after the removals that make room for
        # it.
        self._writing = asyncio.Lock()
        self._misplaced: set[str] = set()
        # By namespace and key: when each file was last used, and its size.
        self._others: dict[tuple[str, str], tuple[float, int]] = {}
        self._scan_began_s = self._scanned_at_s = self._scan_s = 0.0
        self._catching_up = asyncio.Lock()
        self._is_scan_due = self._keeps_disk = self._finds_more = False
        self._reading: dict[NodeKey, ReadProgress] = {}
        self._tells_progress = False
        # Removals of other models' files that were carried out.
        self._last_outcome = WriteOutcome.WRITTEN
        self._num_removals = self._told_removals = 0

    # --- from the engine's thread ----------------------------------------------------------------

    def begin_epoch(self) -> None:
        """A new index gives orders from now on: it does not receive outcomes of earlier orders."""
        self._epoch += 1

    def file_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        return header_bytes_at_most(len(tensors)) + sum(t.nbytes for t in tensors.values())

    def read(self, orders: Sequence[ReadOrder]) -> None:
        for order in orders:
            self._post(partial(self._read, order=order, epoch=self._epoch))

    def find(self, orders: Sequence[FindOrder]) -> None:
        self._post(partial(self._find, orders=orders, epoch=self._epoch))

    def give_up(self, keys: Sequence[NodeKey]) -> None:
        self._post(partial(self._give_up, keys=keys))

    def write(self, node: HalfNode) -> None:
        self._post(partial(self._write, node=node, epoch=self._epoch))

    def remove(self, keys: Sequence[NodeKey]) -> None:
        self._post(lambda disk: self._remove(disk.remove, keys))

    def remove_ends(self, keys: Sequence[NodeKey]) -> None:
        self._post(lambda disk: self._remove(disk.remove_end, keys))

    def remove_others(self, num_bytes: int) -> None:
        self._post(partial(self._remove_others, num_bytes=num_bytes))

    def touch(self, keys: Sequence[NodeKey]) -> None:
        if keys:
            self._post(lambda disk: disk.touch([key.hex() for key in keys]))

    def quarantine(self, key: NodeKey) -> None:
        self._post(lambda disk: _each(disk.quarantine, [key]))

    def _post(self, job: Job) -> None:
        try:
            self._loop.call_soon_threadsafe(self._jobs.put_nowait, job)
        except RuntimeError:
            log.debug("the event loop is closed: an order for the disk came too late")

    # --- on the event loop -----------------------------------------------------------------------

    async def scan(self, disk: DiskTier, *, is_again: bool = False) -> list[Node]:
        """Report files that appeared on or vanished from the disk since the last scan; returns the
        new ones. `is_again`: the index is new, so everything on the disk is reported."""
        began_s = time.monotonic()
        scan = await disk.scan()
        self._scan_began_s, self._scanned_at_s = began_s, time.monotonic()
        self._scan_s = self._scanned_at_s - began_s
        found = scan.nodes if is_again else scan.added
        if found:
            self._misplaced = misplaced(scan.nodes)
        wrong = self._misplaced if found else set()
        sound = (meta for meta in found if meta.key not in wrong)
        added = [node for meta in sound if (node := _node(meta)) is not None]
        gone = [meta.key for meta in scan.removed if meta.namespace == disk.namespace]
        removed = [
            NodeKey(bytes.fromhex(key)) for key in (*gone, *wrong) if len(key) == 2 * KEY_BYTES
        ]
        if wrong:
            log.warning("%d node files are ignored: their parents end elsewhere", len(wrong))
        if added or removed:
            await asyncio.to_thread(self._note, added, removed)
            self._tell(
                lambda prefixes: prefixes.files_changed(added, removed, is_whole=scan.is_whole)
            )
        self._tell_others(disk, scan, is_again=is_again)
        return added

    def _tell_others(self, disk: DiskTier, scan: Scan, *, is_again: bool) -> None:
        """Report the files that count towards the budget without being in the index."""
        before = self._others, self._told_removals
        self._others = {
            (meta.namespace, meta.key): (meta.last_used_s, meta.num_bytes)
            for meta in scan.nodes
            if meta.namespace != disk.namespace
            or meta.key in self._misplaced
            or _node(meta) is None
        }
        self._told_removals = num_removals = self._num_removals
        if is_again or before != (self._others, num_removals):
            files = [*self._others.values()]
            self._tell(lambda prefixes: prefixes.others_changed(files, num_removals))

    async def serve(self, disk: DiskTier, measured: Sequence[NodeKey] = ()) -> None:
        """Run jobs until cancelled. Scans every RESCAN_S for changes by other processes.
        `measured`: nodes with which the disk is measured first, see nodes_to_measure."""
        if measured:
            self._jobs.put_nowait(partial(self._measure, keys=measured))
        self._finds_more = disk.is_shared or disk.has_store
        if self._finds_more:
            self._tell(_begin_lookups)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._rescan(disk))
            tasks.create_task(self._watch(disk))
            tasks.create_task(disk.upload())
            if disk.is_shared:
                tasks.create_task(self._keep(disk))
            while True:  # the job has no name here: it would keep the last node's memory alive
                tasks.create_task(self._do(await self._jobs.get(), disk))

    def scan_again(self) -> None:
        """Scan the disk for a new, empty index."""
        if self._finds_more:
            self._tell(_begin_lookups)
        if self._keeps_disk:
            self._tell(partial(_keep_disk, True))
        self._jobs.put_nowait(partial(self.scan, is_again=True))

    async def catch_up(self, timeout_s: float) -> None:
        """Find what other servers have written so far, within the timeout."""
        caught_up = asyncio.Event()
        job = partial(self._catch_up, since_s=time.monotonic(), caught_up=caught_up)
        self._jobs.put_nowait(job)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await caught_up.wait()

    async def _catch_up(self, disk: DiskTier, since_s: float, caught_up: asyncio.Event) -> None:
        try:
            async with self._catching_up:
                if self._scan_began_s < since_s:
                    at_s = self._scanned_at_s + self._scan_s / SHARED_SCAN_SHARE
                    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
                    await self.scan(disk)
        finally:
            caught_up.set()

    async def drain(self, timeout_s: float) -> None:
        """Wait until every order is done, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(0)  # orders of the engine's thread arrive as callbacks
                await self._jobs.join()
        except TimeoutError:
            words = "the cache directory is slow: nodes were not written within %.0f s"
            log.warning(words, timeout_s)

    def described(self, status: CacheStatus, disk: DiskTier) -> CacheStatus:
        """The status with the counters of the disk."""
        counters = disk.counters()
        return replace(
            status,
            written_bytes_total=counters.bytes_written,
            read_bytes_total=counters.bytes_read,
            quarantined_total=counters.quarantined,
            store=disk.store_counts,
            degraded=disk.degraded,
        )

    async def _measure(self, disk: DiskTier, keys: Sequence[NodeKey]) -> None:
        """Measure the speed of the disk before a prompt needs it."""
        try:
            num_bytes, elapsed_s = await disk.measure([key.hex() for key in keys])
        except CorruptNode as error:  # whose reader sets the file aside
            log.debug("the disk is not measured: %s", error)
            return
        if num_bytes:
            log.debug("start: %.3g MB of nodes read in %.3f s", num_bytes / 1e6, elapsed_s)
            self._tell(lambda prefixes: prefixes.observe("disk_bytes_per_s", num_bytes, elapsed_s))

    async def _rescan(self, disk: DiskTier) -> None:
        while True:
            await asyncio.sleep(RESCAN_S)
            self._jobs.put_nowait(self.scan)

    async def _keep(self, disk: DiskTier) -> None:
        """Renew the lease of the budget, and report when this server acquires or loses it."""
        while True:
            keeps_disk = await disk.keep()
            if keeps_disk != self._keeps_disk:
                self._keeps_disk = keeps_disk
                self._tell(partial(_keep_disk, keeps_disk))
                self._jobs.put_nowait(self.scan)
            elif keeps_disk:
                self._scan_soon()  # other servers write too
            await asyncio.sleep(RENEW_S)

    async def _watch(self, disk: DiskTier) -> None:
        """Periodically check a disk that had faults: it may recover while there is no work."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            try:
                if disk.degraded:
                    await disk.look_again()
                if disk.degraded:  # as found by a scan
                    await self.scan(disk)
            except Exception:  # as found by orders
                log.exception("a look at the cache directory failed")

    def _scan_soon(self) -> None:
        """Schedule a scan after the current one, when it is worth its time."""
        if not self._is_scan_due:
            self._is_scan_due = True
            share = SHARED_SCAN_SHARE if self._finds_more else SCAN_SHARE
            pause_s = max(RESCAN_WHEN_WRITING_S, self._scan_s / share)
            at_s = self._scanned_at_s + pause_s
            self._loop.call_later(max(0.0, at_s - time.monotonic()), self._post, self._scan_due)

    async def _scan_due(self, disk: DiskTier) -> None:
        self._is_scan_due = False
        await self.scan(disk)

    async def _do(self, job: Job, disk: DiskTier) -> None:
        try:
            await job(disk)
        except Exception:  # a failing order must not end the server
            log.exception("an order for the cache directory failed")
        finally:
            self._jobs.task_done()

    def _answer(self, epoch: int, outcome: Callable[[PrefixCache], None]) -> None:
        """Deliver an outcome to the index that gave the order, unless it was replaced."""
        self._tell(lambda prefixes: outcome(prefixes) if epoch == self._epoch else None)

    async def _read(self, disk: DiskTier, order: ReadOrder, epoch: int) -> None:
        result: FetchedNode | Miss = Miss(MissReason.IO_ERROR, "it was not read")
        self._reading[order.key] = progress = ReadProgress()
        if not self._tells_progress:
            self._tells_progress = True
            self._jobs.put_nowait(partial(self._tell_progress, epoch=epoch))
        try:
            found = await disk.read(
                order.key.hex(),
                with_end=order.with_end,
                timeout_s=order.timeout_s,
                progress=progress,
            )
            if isinstance(found, Miss):
                log.debug("node %s: %s: %s", order.key.hex()[:16], found.reason, found.detail)
                result = found
            else:
                result = _fetched(found, with_end=order.with_end)
        finally:
            self._reading.pop(order.key, None)
            self._answer(epoch, lambda prefixes: prefixes.fetched(order.key, result))

    async def _find(self, disk: DiskTier, orders: Sequence[FindOrder], epoch: int) -> None:
        there: list[Node] = []
        wanted = {NodeName(order.key.hex(), order.half): order.patience_s for order in orders}
        timeout_s = FIND_TIMEOUT_S + max(wanted.values())
        try:
            async with asyncio.timeout(timeout_s):
                found = await disk.find(wanted)
            there = [node for meta in found if (node := _node(meta)) is not None]
        except TimeoutError:
            log.debug("%d files were not found within %.3g s", len(orders), timeout_s)
        finally:
            self._answer(epoch, lambda prefixes: prefixes.found(orders, there))

    async def _tell_progress(self, disk: DiskTier, epoch: int) -> None:
        """Report the progress of reads, periodically, while there are any."""
        try:
            while self._reading:
                await asyncio.sleep(PROGRESS_S)
                come = {key: progress.num_bytes for key, progress in self._reading.items()}
                self._answer(epoch, partial(_tell_reading, come))
        finally:
            self._tells_progress = False

    async def _give_up(self, disk: DiskTier, keys: Sequence[NodeKey]) -> None:
        for key in keys:
            if progress := self._reading.get(key):
                progress.give_up()

    async def _remove(
        self, call: Callable[[str], Awaitable[object]], keys: Sequence[NodeKey]
    ) -> None:
        """Remove files before later orders write: they rely on the freed space."""
        async with self._writing:
            await _each(call, keys)

    async def _remove_others(self, disk: DiskTier, num_bytes: int) -> None:
        """Remove files that are not in the index; a scan reports what is left of them."""
        async with self._writing:
            try:
                await disk.remove_others([*self._others], num_bytes)
            finally:
                self._num_removals += 1
            await self.scan(disk)

    async def _write(self, disk: DiskTier, node: HalfNode, epoch: int) -> None:
        outcome, num_bytes = WriteOutcome.IO_ERROR, 0
        try:
            async with self._writing:
                file = await asyncio.to_thread(self._encode, node, disk)
                result = await disk.write(file)
            outcome, num_bytes = result.outcome, result.num_bytes
            self._scan_soon()
            # One line until it changes: a full disk refuses every node.
            level = logging.DEBUG if outcome is self._last_outcome else logging.WARNING
            if outcome is not WriteOutcome.WRITTEN:
                words = node.key.hex()[:16], node.half, result.detail
                log.log(level, "node %s: %s not on disk: %s", *words)
            self._last_outcome = outcome
        finally:
            is_there, again = outcome is WriteOutcome.WRITTEN, outcome is WriteOutcome.BUSY
            written = WriteReport(node.half, is_there, again, num_bytes)
            self._answer(epoch, lambda prefixes: prefixes.written(node.key, written))

    def _encode(self, node: HalfNode, disk: DiskTier) -> EncodedFile:
        """Encode the file's bytes. Hashes all of them."""
        buffers = {name: _bytes_of(tensor) for name, tensor in node.tensors.items()}
        entries = [
            SealedTensor(name, DTYPES[t.dtype], tuple(t.shape), checksum(buffers[name]))
            for name, t in node.tensors.items()
        ]
        entries = file_order(entries, disk.end_kinds)
        metadata = NodeMetadata(
            namespace=disk.namespace,
            key=node.key.hex(),
            parent="" if node.parent is None else node.parent.hex(),
            begin=node.begin,
            end=node.end,
            split=self._split,
            created_s=int(time.time()),
            generated=node.is_generated,
            turn_end=node.is_turn_end,
        )
        return encode_file(entries, buffers, metadata, node.half)


def nodes_to_measure(nodes: Iterable[Node]) -> list[NodeKey]:
    """Those of the nodes that are suitable to measure a disk, in files that are large compared with
    the fixed cost of a read; most recently used first, as they are likeliest to be read."""
    large = (node for node in nodes if (node.file_bytes or 0) >= LEAST_MEASURED_BYTES)
    return [node.key for node in nlargest(NUM_READERS, large, key=lambda node: node.last_used_s)]


def _tell_reading(come: Mapping[NodeKey, int], prefixes: PrefixCache) -> None:
    prefixes.reading(come)


def _begin_lookups(prefixes: PrefixCache) -> None:
    prefixes.begin_lookups()


def _keep_disk(keeps_disk: bool, prefixes: PrefixCache) -> None:
    prefixes.keep_disk(keeps_disk)


async def _each(call: Callable[[str], Awaitable[object]], keys: Iterable[NodeKey]) -> None:
    for key in keys:
        await call(key.hex())


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _fetched(file: NodeFile, *, with_end: bool) -> FetchedNode:
    """Convert the files to what the engine's thread receives."""
    parts = file.header.parts if file.end is None else file.header.parts | file.end.parts
    fault = None if file.end_fault is None else MissReason.CORRUPT
    return FetchedNode(
        _tensors(file), file.parts, parts if with_end else None, file.num_bytes, fault
    )


def _tensors(file: NodeFile) -> dict[str, Tensor]:
    """The file's tensors as views of its buffer. Tensors of unknown dtypes are left out, so that
    the node cannot be adopted."""
    return {
        slot.name: torch.frombuffer(file.tensors[slot.name], dtype=dtype).view(slot.shape)
        for slot in file.slots
        if slot.name in file.tensors and (dtype := TORCH_DTYPES.get(slot.dtype)) is not None
    }


def _node(meta: NodeMeta) -> Node | None:
    """What the index needs to know of a file; None for a file of another program."""
    if meta.metadata is None or len(meta.key) != 2 * KEY_BYTES:
        return None
    parent = meta.metadata.parent
    if len(parent) not in (0, 2 * KEY_BYTES):
        return None
    return Node(
        key=NodeKey(bytes.fromhex(meta.key)),
        parent=NodeKey(bytes.fromhex(parent)) if parent else None,
        begin=meta.metadata.begin,
        tokens=meta.tokens,
        tiers=DISK,
        state_tiers=DISK if NodePart.STATE in meta.parts else NOWHERE,
        logits_tiers=DISK if NodePart.LOGITS in meta.parts else NOWHERE,
        num_bytes=meta.span_bytes,
        state_bytes=meta.end_bytes,
        file_bytes=meta.num_bytes - meta.end_file_bytes,
        end_file_bytes=meta.end_file_bytes,
        is_turn_end=meta.metadata.turn_end,
        is_generated=meta.metadata.generated,
        last_used_s=meta.last_used_s,
        saved_at_s=float(meta.metadata.created_s),
    )
