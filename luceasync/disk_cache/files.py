"""Calls to the operating system for node files, which block, and threads in which they run.

Owns the threads, open files, and abandoned calls. Knows no node and no directory layout.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from aiofiles.threadpool import wrap

from luceasync.disk_cache.codec import Buffer, header_extent
from luceasync.errors import CorruptNode

HEAD_BYTES = 32 << 10  # holds the header of most nodes
HUGE_PAGE_BYTES = 2 << 20  # systems align a mapping of whole huge pages so that it can use them
NUM_THREADS = 4
PIECE_BYTES = 4 << 20  # a hop to a thread and back costs as much as half a MiB
SMALL_BYTES = 1 << 20
MEASURED_PIECE_BYTES = 1 << 20
MEASURED_FROM_BYTES = 1 << 20  # scans have read what is before it
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

T = TypeVar("T")


class FileSystem:
    """What the disk tier needs of the operating system. Every call may raise OSError."""

    @cached_property
    def host(self) -> str:
        """What tells this host, since it was started, from others that use the same directory: 16
        hexadecimal digits. Containers of one host share it.
        """
        try:
            boot = BOOT_ID.read_bytes()
        except OSError:
            boot = uuid.getnode().to_bytes(8, "big")
        return hashlib.blake2b(boot, digest_size=8).hexdigest()

    def create(self, path: Path) -> FileIO:
        """A new file for its owner alone, locked while it is open."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        raw = FileIO(os.open(path, flags, 0o600), "wb")
        with contextlib.suppress(OSError):  # without locks, the process id must do
            fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return raw

    def open(self, path: Path) -> FileIO:
        """A regular file, to be read. Raises CorruptNode for anything else."""
        self._expect_regular(path, os.lstat(path).st_mode)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # it has just become a link or socket
                raise CorruptNode(f"{path.name}: expected a regular file") from None
            raise
        try:
            self._expect_regular(path, os.fstat(fd).st_mode)
            return FileIO(fd, "rb")
        except BaseException:
            os.close(fd)
            raise

    def sync(self, raw: FileIO) -> None:
        """Flush the file's content to the disk."""
        os.fsync(raw.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Rename the file, over an existing one."""
        os.replace(source, target)

    def sync_directory(self, path: Path) -> None:
        """Flush the names in the directory to the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> bool:
        """Remove the file or link; whether it existed."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def entries(self, path: Path) -> list[os.DirEntry[str]]:
        """The entries of the directory, sorted by name."""
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written to the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def now_s(self, directory: Path) -> float:
        """The time by the clock that dates the directory's files, which may be another host's."""
        path = directory / f".{secrets.token_hex(8)}.clock"
        try:
            with self.create(path) as raw:
                return os.fstat(raw.fileno()).st_mtime
        finally:
            self.remove(path)

    def is_locked(self, path: Path) -> bool:
        """Whether a writer, of this process or another, has the file open."""
        with self.open(path) as raw:
            try:
                fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    @staticmethod
    def _expect_regular(path: Path, mode: int) -> None:
        if not stat.S_ISREG(mode):
            kind = stat.filemode(mode)[0]
            raise CorruptNode(f"{path.name}: a file of kind {kind!r}, expected a regular one")


def read_head(raw: FileIO) -> tuple[bytes, int]:
    """The first bytes of a node file, its whole header among them, and the size of the file.

    Raises OSError, and CorruptNode if the header cannot be as long as it says.
    """
    file_bytes = os.fstat(raw.fileno()).st_size
    head = raw.read(min(file_bytes, HEAD_BYTES)) or b""
    while len(head) < header_extent(head, file_bytes):
        more = raw.read(header_extent(head, file_bytes) - len(head))
        if not more:
            break
        head += more
    return head, file_bytes


def allocate(num_bytes: int) -> memoryview:
    """Fresh page-aligned memory, in huge pages if available: faults cost more than reads.

    Raises MemoryError.
    """
    whole_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        area = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.resize(num_bytes)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes: {error}") from None
    with contextlib.suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


def timed_read(
    files: FileSystem, paths: Sequence[Path], bytes_each: int, limit_s: float
) -> tuple[int, float]:
    """(bytes, seconds) of reading files, all at once, each by a thread: at most `bytes_each` behind
    the first MEASURED_FROM_BYTES, in pieces that begin within `limit_s`. Raises OSError and
    CorruptNode.

    What was read lately is in the system's page cache, and read as fast as that: so are restores.
    """
    began_s = time.perf_counter()

    def read(path: Path) -> int:
        num_bytes, piece = 0, memoryview(bytearray(min(bytes_each, MEASURED_PIECE_BYTES)))
        with files.open(path) as raw:
            raw.seek(MEASURED_FROM_BYTES)
            while num_bytes < bytes_each and time.perf_counter() - began_s < limit_s:
                count = raw.readinto(piece[: bytes_each - num_bytes])
                if not count:
                    break
                num_bytes += count
        return num_bytes

    with ThreadPoolExecutor(max(1, len(paths)), "measure-disk") as threads:
        num_bytes = sum(threads.map(read, paths))
    return num_bytes, time.perf_counter() - began_s


class FileThreads:
    """A few threads for blocking calls, and the calls that were abandoned to them."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self.executor = ThreadPoolExecutor(num_threads, thread_name_prefix="disk")
        self._left: set[asyncio.Task[None]] = set()

    def submit(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run the function in a thread."""
        return asyncio.get_running_loop().run_in_executor(self.executor, function, *args)

    def finish_later(self, call: asyncio.Future[object], function: Callable[[], None]) -> None:
        """Run the function in a thread once the abandoned `call` has ended."""
        task = asyncio.create_task(self._finish(call, function))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def close(self, timeout_s: float) -> None:
        """Wait for abandoned calls, at most `timeout_s`."""
        if self._left:
            await asyncio.wait(self._left, timeout=timeout_s)
        self.executor.shutdown(wait=False)

    async def _finish(self, call: asyncio.Future[object], function: Callable[[], None]) -> None:
        await asyncio.wait((call,))
        if not call.cancelled():
            call.exception()  # retrieved, so that asyncio does not log it
        await self.submit(function)


class HungReads:
    """Abandoned reads that have not returned. True while there are any: then the disk hangs, and
    no read is to be tried; they are the probe themselves. Event loop only.
    """

    def __init__(self, came_back: Callable[[str], None]) -> None:
        """`came_back` is told the fault of the first one that returns, "" if it has none."""
        self._came_back = came_back
        self._calls: set[asyncio.Future[Any]] = set()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def leave(self, call: asyncio.Future[Any]) -> None:
        """Abandon `call`."""
        self._calls.add(call)
        call.add_done_callback(self._end)

    def _end(self, call: asyncio.Future[Any]) -> None:
        fault = None if call.cancelled() else call.exception()
        if call in self._calls:
            # The disk answers: the other calls tell nothing new.
            self._calls.clear()
            self._came_back(str(fault) if isinstance(fault, OSError) else "")


class ThreadedFile:
    """One file whose calls run in threads, one after the other.

    A call that hangs can be abandoned by cancellation; the file is closed when the call has ended,
    never during it, and then discarded.
    """

    def __init__(
        self,
        threads: FileThreads,
        opener: Callable[[], FileIO],
        discard: Callable[[], object] | None = None,
    ) -> None:
        self._threads = threads
        self._opener = opener
        self._discard = discard
        self._raw: FileIO | None = None
        self._call: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.call(self._open)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._call is not None
        if self._call.done():
            await self.call(self._release)
        else:
            self._threads.finish_later(self._call, self._release)

    @property
    def raw(self) -> FileIO:
        """The open file."""
        assert self._raw is not None
        return self._raw

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run the function in a thread."""
        return await self._step(self._threads.submit(function, *args))

    async def write(self, pieces: Iterator[Buffer]) -> None:
        """Write all the pieces. Raises OSError."""
        file: Any = wrap(self.raw, executor=self._threads.executor)
        for piece in pieces:
            view, written = memoryview(piece), 0
            while written < len(view):  # a call may take less than it was given
                written += await self._step(file.write(view[written:]))

    async def _step(self, call: Awaitable[T]) -> T:
        step = asyncio.ensure_future(call)
        self._call = step
        return await asyncio.shield(step)

    def _open(self) -> None:
        self._raw = self._opener()

    def _release(self) -> None:
        close = None if self._raw is None else self._raw.close
        for last in (close, self._discard):
            with contextlib.suppress(OSError):  # what must be on the disk was synced before
                if last is not None:
                    last()


def pieces(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """The buffers' bytes in order: large ones in slices, not copied, runs of small ones joined."""
    small: list[memoryview] = []
    small_bytes = 0
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes < SMALL_BYTES:
            small.append(view)
            small_bytes += view.nbytes
        if small and max(small_bytes, view.nbytes) >= SMALL_BYTES:
            yield b"".join(small)
            small, small_bytes = [], 0
        if view.nbytes >= SMALL_BYTES:
            view = view.cast("B")
            for begin in range(0, len(view), PIECE_BYTES):
                yield view[begin : begin + PIECE_BYTES]
    if small:
        yield b"".join(small)
